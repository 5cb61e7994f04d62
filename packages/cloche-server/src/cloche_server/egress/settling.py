"""Which connections the interceptor has not yet said its last word on, by command.

A program can end before the interceptor has read what it sent: without a wait, what was refused of it would come too late for the
command's own list of denials. Nobody waits who had nothing intercepted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

WAIT_S_MAX: Final = 0.05


class Settling:
    """One sandbox's. What is added is removed when the interceptor is done with it, or dead."""

    def __init__(self) -> None:
        self._open: dict[str, set[object]] = {}
        self._waiting: dict[str, list[Callable[[], None]]] = {}

    def add(self, command: str | None, connection: object) -> None:
        if command is not None:
            self._open.setdefault(command, set()).add(connection)

    def remove(self, command: str | None, connection: object) -> None:
        if command is None or (found := self._open.get(command)) is None:
            return
        found.discard(connection)
        if not found:
            del self._open[command]
            for then in self._waiting.pop(command, ()):
                then()

    def when_settled(self, command: str, then: Callable[[], None]) -> None:
        """`then` at once when nothing is open; else after the last one, or after the longest wait."""
        if command not in self._open:
            then()
            return
        self._waiting.setdefault(command, []).append(then)
        asyncio.get_running_loop().call_later(WAIT_S_MAX, self._late, command)

    def _late(self, command: str) -> None:
        for then in self._waiting.pop(command, ()):
            then()
