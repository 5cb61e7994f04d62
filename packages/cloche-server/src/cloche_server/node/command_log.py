"""One command's output on disk: `output` holds the bytes as they came, `index` says which were stderr.

The public offset is the file's offset. An index entry is written when the descriptor changes, *before* the bytes it
describes, and carries where that descriptor's own stream stands; so the last two entries and the file's length tell
how much of each stream is logged, whatever moment the writer was killed at. Nothing of it is kept in memory.

`on_full`: *end* keeps what fits and says that it is full; *drop_oldest* frees the front; *block* takes no more than
fits beyond what every following reader has passed. Of what they passed a replay margin is kept on top of the limit, so that
a reader that lost its connection, and with it what was on its way, can come back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from cloche.wire.commands import Cursor, OnFull, OutputState
from cloche.wire.defaults import MIB
from cloche.wire.errors import error
from cloche_server.node.bytes_on_disk import cut, punch, write_all
from cloche_server.node.log_index import ENTRY, HEADER, MAGIC, Run
from cloche_server.node.log_reader import STDERR, STDOUT, LogReader

PUNCH_BYTES: Final = MIB
REPLAY_BYTES_MAX: Final = 8 * MIB
"""More than one connection holds on its way: our pieces, its write buffer and the kernel's."""
INDEX_BYTES_FREE: Final = 64 * 1024
"""An honest command's switches cost nothing; a guest that alternates with every byte pays for its index."""


class LogBroken(Exception):
    """The files contradict each other in a way that no crash of the writer explains."""


class CommandLog:
    """The log of one command, for its one writer and any number of readers in this process."""

    def __init__(self, directory: str | Path, *, bytes_max: int, on_full: OnFull) -> None:
        self.bytes_max = bytes_max
        self.on_full: OnFull = on_full
        self.on_room: Callable[[], None] | None = None
        self.complete = False
        self.generation = 1
        self.end = 0
        self.runs = 0
        self.readers: set[LogReader] = set()
        self._directory = os.fspath(directory)
        self._is_new = False
        self._spare: Callable[[str], bool] | None = None
        self._fds: tuple[int, int] | None = None
        self._punched = 0
        self._released = 0
        self._passed = 0
        """For *block*: what all following readers had passed when it was last full."""
        self._index_punched = 0
        self._last = Run(0, 0, 0)
        self._counts = {STDOUT: 0, STDERR: 0}
        self._waiters: set[asyncio.Future[None]] = set()

    @classmethod
    def create(
        cls,
        directory: str | Path,
        *,
        bytes_max: int,
        on_full: OnFull,
        spare: Callable[[str], bool] | None = None,
    ) -> CommandLog:
        """The directory and its files come with the first byte, so a command waits for none of it; by `spare`, if that has one."""
        log = cls(directory, bytes_max=bytes_max, on_full=on_full)
        log._is_new = True
        log._spare = spare
        return log

    @classmethod
    def recover(cls, directory: Path, *, bytes_max: int, on_full: OnFull) -> CommandLog:
        """The log as a killed writer left it."""
        log = cls(directory, bytes_max=bytes_max, on_full=on_full)
        if not directory.is_dir():
            log._is_new = True  # not a byte was written
            return log
        log._fds = log._open(os.O_CREAT)
        log._recover()
        return log

    # --- what is known ------------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """The oldest offset that can be read."""
        kept = self.end - self.bytes_max if self.on_full == "drop_oldest" else 0
        return max(self._punched, self._released, kept)

    @property
    def state(self) -> OutputState:
        return OutputState(generation=self.generation, first=self.first, end=self.end, complete=self.complete)

    @property
    def stored_bytes(self) -> int:
        """What counts towards the limit: the bytes that can be read and were not passed, and the index beyond its free part."""
        return self.end - max(self.first, self._passed) + max(0, self._index_bytes - INDEX_BYTES_FREE)

    @property
    def disk_bytes(self) -> int:
        return self.end - self._punched + self._index_bytes

    @property
    def _index_bytes(self) -> int:
        return ENTRY.size * (self.runs - self._index_punched)

    def logged(self, fd: int) -> int:
        """How many bytes of that descriptor's own stream are in the log."""
        return self._counts[fd]

    def room(self, fd: int, wanted: int = 1) -> int:
        """How many bytes of `fd` can be appended now; without a bound for drop_oldest."""
        if self.on_full == "drop_oldest":
            return 1 << 62
        room = self._room(fd)
        if room < wanted and self.on_full == "block" and self._release_passed():
            room = self._room(fd)
        return room

    def _room(self, fd: int) -> int:
        grows = ENTRY.size if fd != self._last.fd else 0
        over = max(0, self._index_bytes + grows - INDEX_BYTES_FREE) - max(0, self._index_bytes - INDEX_BYTES_FREE)
        return max(0, self.bytes_max - self.stored_bytes - over)

    # --- writing ------------------------------------------------------------------------------------

    def append(self, fd: int, buffers: Sequence[bytes | memoryview]) -> int:
        """Writes what there is room for, in order; how many bytes that was."""
        total = sum(map(len, buffers))
        room = self.room(fd, total)
        if total > room:
            buffers, total = cut(buffers, room), room
        if not total:
            return 0
        output, index = self._files()
        try:
            if fd != self._last.fd:
                run = Run(self.end, self._counts[fd], fd)
                write_all(index, [ENTRY.pack(*run)])
                self._last = run
                self.runs += 1
            write_all(output, buffers)
        except OSError:  # the disk is full: what the files hold now is the truth
            self._recover()
            raise
        self.end += total
        self._counts[fd] += total
        if self.on_full == "drop_oldest":
            self._drop_oldest()
        self._wake()
        return total

    def finish(self) -> None:
        """No byte will follow."""
        self.complete = True
        self._wake()
        self._close_if_unused()

    def branch(self, at: int) -> None:
        """A restore: a new generation that goes on at `at`; what came after it is gone, and old cursors are told so."""
        assert self.first <= at <= self.end
        self.generation += 1
        self._write_header()
        output, _ = self._files()
        os.ftruncate(output, at)
        self.complete = False
        self._recover()
        self._wake()

    def close(self) -> None:
        if self._fds is not None:
            for each in self._fds:
                os.close(each)
            self._fds = None

    def _drop_oldest(self) -> None:
        if self.first - self._punched >= PUNCH_BYTES:
            self._punch(self.first)
        if self.stored_bytes > self.bytes_max + INDEX_BYTES_FREE:  # many switches: free the index of what is dropped,
            self._punch(self.first)
        if self.stored_bytes > self.bytes_max + INDEX_BYTES_FREE:  # and if that is not enough, of what would be kept
            self._released = min(self.end, self.first + max(PUNCH_BYTES, self.bytes_max // 4))
            self._punch(self.first)

    def _release_passed(self) -> bool:
        """For *block*, and only when it is full: frees what all following readers have passed."""
        following = [reader for reader in self.readers if reader.follows]
        if not following:
            return False
        passed = min(reader.offset for reader in following)
        if passed <= max(self.first, self._passed):
            return False
        self._passed = passed
        self._released = min(max(reader.start, reader.offset - REPLAY_BYTES_MAX) for reader in following)
        if self.first - self._punched >= PUNCH_BYTES:
            self._punch(self.first)
        return True

    def _punch(self, to: int) -> None:
        """The header first: a reader must never take freed zeros for output."""
        entries = self.find_run(to, self._index_punched)
        self._punched, self._index_punched = to, entries
        self._write_header()
        output, index = self._files()
        punch(output, 0, to)
        punch(index, HEADER.size, entries * ENTRY.size)

    def _write_header(self) -> None:
        _, index = self._files()
        os.pwrite(index, HEADER.pack(MAGIC, self.generation, self._punched, self._index_punched), 0)
        os.lseek(index, 0, os.SEEK_END)

    # --- reading ------------------------------------------------------------------------------------

    def reader(self, start: Cursor, *, fd: int | None = None, follows: bool = False) -> LogReader:
        """Raises rolled_back, cursor_lost or cursor_ahead."""
        if start.generation != self.generation:
            known = {"generation": self.generation, "first": self.first, "end": self.end}
            if start.generation > self.generation:
                raise error("cursor_ahead", f"Generation {start.generation} has not begun.", detail=known)
            raise error("rolled_back", f"Generation {start.generation} is over.", detail=known)
        self.check(start.offset)
        return LogReader(self, start.offset, fd, follows)

    def check(self, offset: int) -> None:
        if offset < self.first:
            detail = {"first": self.first, "generation": self.generation}
            raise error("cursor_lost", f"Output before offset {self.first} was dropped.", detail=detail)
        if offset > self.end:
            detail = {"end": self.end, "generation": self.generation}
            raise error("cursor_ahead", f"The output ends at {self.end}.", detail=detail)

    def runs_at(self, number: int, count: int) -> list[Run]:
        """Up to `count` index entries from `number` on."""
        _, index = self._files()
        size = max(0, min(count, self.runs - number)) * ENTRY.size
        raw = os.pread(index, size, HEADER.size + number * ENTRY.size)
        return [Run(*values) for values in ENTRY.iter_unpack(raw[: len(raw) // ENTRY.size * ENTRY.size])]

    def find_run(self, offset: int, low: int | None = None) -> int:
        """The number of the run that holds `offset`."""
        low, high = self._index_punched if low is None else low, self.runs
        while high - low > 1:
            middle = (low + high) // 2
            if self.runs_at(middle, 1)[0].offset <= offset:
                low = middle
            else:
                high = middle
        return low

    def pread(self, size: int, offset: int) -> bytes:
        return os.pread(self._files()[0], size, offset)

    async def changed(self) -> None:
        """Returns at the next append, release or finish."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _wake(self) -> None:
        if self._waiters:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def reader_moved(self) -> None:
        if self.on_room is not None and self.on_full == "block" and not self.complete:
            self.on_room()

    def reader_left(self, reader: LogReader) -> None:
        self.readers.discard(reader)
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.complete and not self.readers:
            self.close()

    # --- files --------------------------------------------------------------------------------------

    def _open(self, flags: int) -> tuple[int, int]:
        mode = os.O_RDWR | os.O_CLOEXEC | flags
        output = os.open(f"{self._directory}/output", mode | os.O_APPEND, 0o600)
        try:
            return output, os.open(f"{self._directory}/index", mode, 0o600)
        except BaseException:
            os.close(output)
            raise

    def _files(self) -> tuple[int, int]:
        if self._fds is None:
            if self._is_new and self._spare is not None and self._spare(self._directory):
                self._is_new = False
            if self._is_new:
                os.makedirs(self._directory, mode=0o700, exist_ok=True)
            self._fds = self._open(os.O_CREAT if self._is_new else 0)
            if self._is_new:
                self._is_new = False
                self._write_header()
            else:
                os.lseek(self._fds[1], 0, os.SEEK_END)
        return self._fds

    def _recover(self) -> None:
        output, index = self._files()
        self.end = os.fstat(output).st_size
        size = os.fstat(index).st_size
        if size < HEADER.size:  # killed before the first byte could come
            if self.end:
                raise LogBroken("output without an index")
            os.ftruncate(index, 0)
            self._write_header()
            size = HEADER.size
        magic, self.generation, self._punched, self._index_punched = HEADER.unpack(os.pread(index, HEADER.size, 0))
        if magic != MAGIC or self._punched > self.end:
            raise LogBroken("the index's header is not one of this version, or names bytes that never were")
        self.runs = (size - HEADER.size) // ENTRY.size
        self._drop_empty_runs(index)
        self._count()

    def _drop_empty_runs(self, index: int) -> None:
        """An entry at or beyond the end describes bytes that were never written; a torn one describes nothing."""
        kept = self._index_punched + 1 if self._index_punched else 0  # one entry must tell the counts of what was freed
        while self.runs > kept and self.runs_at(self.runs - 1, 1)[0].offset >= self.end:
            self.runs -= 1
        os.ftruncate(index, HEADER.size + self.runs * ENTRY.size)
        os.lseek(index, 0, os.SEEK_END)

    def _count(self) -> None:
        self._counts = {STDOUT: 0, STDERR: 0}
        self._last = Run(0, 0, 0)
        upper = self.end
        for run in reversed(self.runs_at(max(self._index_punched, self.runs - 2), 2)):
            if run.fd not in self._counts or run.offset > upper:
                raise LogBroken(f"run {run} is impossible before {upper}")
            self._counts[run.fd] = run.fd_offset + upper - run.offset
            self._last = max(self._last, run)
            upper = run.offset
        if self.end and not self.runs:
            raise LogBroken("bytes that no run describes")
        if self.runs - self._index_punched == 1:  # the other descriptor's last run was freed: the sum tells the rest
            other = STDOUT + STDERR - self._last.fd
            self._counts[other] = self.end - self._counts[self._last.fd]


def make_empty(directory: str) -> None:
    """A log without a byte, as `_files` makes one."""
    os.mkdir(directory, 0o700)
    os.close(os.open(f"{directory}/output", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    index = os.open(f"{directory}/index", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        write_all(index, [HEADER.pack(MAGIC, 1, 0, 0)])
    finally:
        os.close(index)
