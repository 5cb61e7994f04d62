"""Empty command logs, made while nobody waits: three new names on a disk would cost every command's first byte a third of a millisecond.

A spare is whole before it is taken, and taking it is one rename, so a crash leaves either a spare or a log without a byte. What
a dead daemon left is removed at the next one's start.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cloche_server.logs import Log
from cloche_server.node.command_log import make_empty

SPARES: Final = 8
NEXT_S: Final = 0.01
"""Between two of them, so that nothing else waits long."""


class Spares:
    """`after` plans something: seconds, what."""

    def __init__(self, directory: Path, after: Callable[[float, Callable[[], None]], object]) -> None:
        self._directory = str(directory)
        self._after = after
        self._ready: deque[str] = deque()
        self._free = list(range(SPARES))
        self._filling = False
        if directory.is_dir():
            shutil.rmtree(directory)

    def want(self) -> None:
        """There will be commands soon."""
        if not self._filling and self._free:
            self._filling = True
            self._after(NEXT_S, self._make)

    def take(self, to: str) -> bool:
        """Puts one where a log is needed. False when there is none: then it is made there."""
        if not self._ready:
            self.want()
            return False
        spare = self._ready.popleft()
        self._free.append(int(os.path.basename(spare)))
        self.want()
        for _ in range(2):
            try:
                os.rename(spare, to)
                return True
            except FileNotFoundError:  # a sandbox's first: the directory of its commands comes with it
                os.makedirs(os.path.dirname(to), mode=0o700, exist_ok=True)
        return False

    def _make(self) -> None:
        self._filling = False
        spare = f"{self._directory}/{self._free[-1]}"
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            make_empty(spare)
        except OSError as bad:  # a full disk: the command that needs it will say so by name
            Log().error("no spare log", error=str(bad))
            shutil.rmtree(spare, ignore_errors=True)
            return
        self._free.pop()
        self._ready.append(spare)
        self.want()
