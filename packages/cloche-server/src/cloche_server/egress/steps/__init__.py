"""The way of an attempt, in order. Each *step* is one file with one function, `step`.

A step looks at what is known of the attempt, adds what it finds, and refuses by raising `Refused`. None of them knows by which
conversation the attempt came, none catches another's refusal, and none is left out for a client: what differs is only when the
later ones run (`LATER`).

Deliberately absent: the bytes of a connection, and any decision of its own about names and ports: that is the policy's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from cloche_server.egress.attempt import Attempt
from cloche_server.egress.steps import allow, approve, check, dial, limit, normalise, record, resolve

Step = Callable[[Attempt], Awaitable[None]]

STEPS: Final[Sequence[Step]] = (
    normalise.step,
    allow.step,
    approve.step,
    resolve.step,
    check.step,
    limit.step,
    record.step,
    dial.step,
)

LATER: Final = frozenset({resolve.step, check.step, dial.step})
"""When an interceptor gets the bytes, these wait until it has a request that may go out."""


async def run(attempt: Attempt) -> None:
    for step in STEPS:
        if not (attempt.intercepted and step in LATER):
            await step(attempt)


async def run_later(attempt: Attempt) -> None:
    for step in STEPS:
        if step in LATER:
            await step(attempt)
