"""A sandbox's own record of every attempt: told to the journal first, then a JSON line in two files that take turns.

A line is written before its effect. The last 10,000 are always kept, never more than 20,000. Numbers are without gaps, so
that a reader can say from where it goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from cloche.wire.egress import EgressRecord

KEPT_MIN: Final = 10_000
RECENT: Final = 256
LINE_BYTES_MAX: Final = 65_536


class Records:
    """One writer, or only readers, of `path` and its older half beside it."""

    def __init__(
        self,
        path: Path,
        *,
        sandbox: str = "",
        journal: Callable[[EgressRecord], None] | None = None,
        clock: Callable[[], float] = time.time,
        file_lines_max: int = KEPT_MIN,
    ) -> None:
        self._path = path
        self._older = path.with_name(f"{path.stem}.1{path.suffix}")
        self._sandbox = sandbox
        self._journal = journal
        self._clock = clock
        self._file_lines_max = file_lines_max
        self._fd = -1
        self._recent: deque[bytes] = deque(maxlen=RECENT)
        self._waiters: list[asyncio.Future[None]] = []
        self._first_in_file = 1
        self.seq = 0
        """Number of the last record."""
        self._recover()

    def write(self, record: EgressRecord) -> EgressRecord:
        """Give it its number and time, tell the journal, keep it. Returns when the kernel has it."""
        record = record.model_copy(update={"seq": self.seq + 1, "at": self._clock(), "sandbox": self._sandbox})
        line = record.model_dump_json(exclude_defaults=True).encode() + b"\n"
        assert len(line) <= LINE_BYTES_MAX, "a record holds names, never content"
        if self._journal is not None:
            self._journal(record)
        self._append(line)
        self.seq = record.seq
        self._recent.append(line)
        self._wake()
        return record

    def read(self, after: int = 0, limit: int = 1000) -> list[EgressRecord]:
        """Records with a number above `after`, oldest first."""
        if after >= self.seq:
            return []
        lines = self._recent if after >= self.seq - len(self._recent) else self._lines()
        records = (EgressRecord.model_validate_json(line) for line in lines)
        return list(itertools.islice((each for each in records if each.seq > after), limit))

    def bytes_moved(self) -> int:
        """By connections that are closed, as far as their records are kept."""
        closed = (EgressRecord.model_validate_json(line) for line in self._lines() if b'"verdict":"closed"' in line)
        return sum((each.bytes_up or 0) + (each.bytes_down or 0) for each in closed)

    async def wait(self, after: int) -> None:
        """Until there is a record with a number above `after`. The caller sets the time-out."""
        while self.seq <= after:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _append(self, line: bytes) -> None:
        if self.seq + 1 - self._first_in_file >= self._file_lines_max:
            self.close()
            self._path.replace(self._older)
            self._first_in_file = self.seq + 1
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
        at = os.fstat(self._fd).st_size
        if os.write(self._fd, line) != len(line):  # a disk that is full: take the half line back, then say so
            os.ftruncate(self._fd, at)
            raise OSError(28, "the disk of the egress records is full")

    def _lines(self) -> Iterator[bytes]:
        for path in (self._older, self._path):
            if path.exists():
                with path.open("rb") as file:
                    yield from (line for line in file if line.endswith(b"\n"))

    # --- after a crash ----------------------------------------------------------------------------

    def _recover(self) -> None:
        """Go on after the last whole line; a torn one is cut off when we are the writer."""
        for path in (self._path, self._older):
            first, last = _ends(path)
            if last is not None:
                self.seq = EgressRecord.model_validate_json(last).seq
                if path is self._path and first is not None:
                    self._first_in_file = EgressRecord.model_validate_json(first).seq
                else:
                    self._first_in_file = self.seq + 1
                break
        if self._journal is not None and self._path.exists():
            _cut_torn_line(self._path)


def _ends(path: Path) -> tuple[bytes | None, bytes | None]:
    """The first and the last whole line."""
    try:
        with path.open("rb") as file:
            first = file.readline(LINE_BYTES_MAX)
            if not first.endswith(b"\n"):
                return None, None
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 2 * LINE_BYTES_MAX))
            tail = file.read()
    except FileNotFoundError:
        return None, None
    whole = tail[: tail.rfind(b"\n") + 1].splitlines()
    return first, whole[-1]


def _cut_torn_line(path: Path) -> None:
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - LINE_BYTES_MAX)
        file.seek(start)
        keep = file.read().rfind(b"\n") + 1
        if start + keep < size:
            file.truncate(start + keep)
