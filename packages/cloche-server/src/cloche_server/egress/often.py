"""What could happen thousands of times a second is told once, then once with a count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

EVERY_S = 1.0


class Often:
    """`tell(count)` is called at the first time, and at most once a second after that while it goes on."""

    __slots__ = ("_count", "_tell", "_timer")

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def happened(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._due)
            self._tell(1)
        else:
            self._count += 1

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if self._count:
                self._tell(self._count)
                self._count = 0

    def _due(self) -> None:
        self._timer = None
        if self._count:
            count, self._count = self._count, 0
            self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._due)
            self._tell(count)
