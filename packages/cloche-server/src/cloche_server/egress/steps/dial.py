"""Connect to an address that was checked. The name is not used again."""

from __future__ import annotations

from cloche_server.egress import sockets
from cloche_server.egress.attempt import Attempt, Refused


async def step(attempt: Attempt) -> None:
    target = attempt.at()
    try:
        attempt.sock, attempt.address = await sockets.dial(attempt.addresses, target.port)
    except sockets.DialFailed as bad:
        raise Refused("unreachable", f"{target.host}:{target.port} cannot be reached: {bad}", attempt.rule) from bad
