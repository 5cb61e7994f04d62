"""What can go wrong on the way to a node, as our errors; and when to try again. Pure."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from typing import Final

from pydantic import ValidationError

from cloche.client._target import Target
from cloche.wire.errors import ClocheError, Problem, error, from_problem

FIRST_DELAY_S: Final = 0.05
DELAY_S_MAX: Final = 1.0
CAUSES_MAX: Final = 16
PATIENCE_NEW_S: Final = 0.5
"""For a node that never answered: long enough for one that is just being replaced, short enough for a typing error."""
PATIENCE_KNOWN_S: Final = 30.0
"""For a node that answered before: it is being upgraded, or the network is down for a moment."""


def translate(raised: BaseException, target: Target) -> ClocheError:
    """A transport's exception as ours. Told by what is underneath, for a transport may wrap it twice."""
    cause: BaseException | None = raised
    number: int | None = None
    is_timeout = False
    for _ in range(CAUSES_MAX):
        if cause is None:
            break
        if isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__:
            is_timeout = True
        if isinstance(cause, OSError) and cause.errno is not None:
            number = cause.errno
        cause = cause.__cause__ or cause.__context__
    if number in (errno.EACCES, errno.EPERM):
        return error("node_refused", f"{target} may not be used by you.")
    if number in (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR, errno.ENOTSOCK):
        return error("node_unavailable", f"No node answers at {target}.")
    if is_timeout:
        return error("time_out", f"The node at {target} did not answer in time.")
    return error("node_unavailable", f"The connection to {target} was lost ({type(raised).__name__}).")


def refusal(status: int, body: bytes, headers: Mapping[str, str]) -> ClocheError:
    """An answer that is not a success, as the error it carries."""
    try:
        return from_problem(Problem.model_validate_json(body))
    except ValidationError:
        pass
    code = "node_unavailable" if status in (502, 503, 504) else "unauthenticated" if status == 401 else "internal"
    server = headers.get("server", "something on the way")
    return error(code, f"The answer was not the node's: status {status} from {server[:40]!r}.")


class Patience:
    """How long to go on trying. Any progress begins it anew."""

    def __init__(self, patience_s: Callable[[], float], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self.progressed()

    def progressed(self) -> None:
        self._delay_s = FIRST_DELAY_S
        self._until: float | None = None

    def delay_s(self, failure: ClocheError) -> float:
        """What to wait before the next try; raises the failure when it is enough, or when trying can't help."""
        if not failure.kind.retryable:
            raise failure
        now = self._clock()
        if self._until is None:
            self._until = now + self._patience_s()
        if now >= self._until:
            raise failure
        delay, self._delay_s = self._delay_s, min(self._delay_s * 2, DELAY_S_MAX)
        return min(max(delay, failure.retry_after_s or 0.0), max(self._until - now, 0.001))
