"""One reader's place in a command's log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cloche.wire.defaults import MIB
from cloche.wire.errors import error
from cloche_server.node.log_index import Run

if TYPE_CHECKING:
    from cloche_server.node.command_log import CommandLog

CHUNK_BYTES_MAX: Final = MIB
STDOUT: Final = 1
STDERR: Final = 2


class LogReader:
    """One reader's place in a log. A context manager: while inside, `block` waits for one that follows."""

    RUNS_AHEAD: Final = 256
    RUNS_PER_CALL_MAX: Final = 4096

    def __init__(self, log: CommandLog, start: int, fd: int | None, follows: bool) -> None:
        self.follows = follows
        self.start = start
        self.offset = start
        self._log = log
        self._fd = fd
        self._number = -1
        self._runs: list[Run] = []
        self._generation = log.generation

    def __enter__(self) -> LogReader:
        self._log.readers.add(self)
        self._log.reader_moved()
        return self

    def __exit__(self, *_: object) -> None:
        self._log.reader_left(self)

    def read(self, bytes_max: int = CHUNK_BYTES_MAX) -> tuple[int, int, bytes] | None:
        """(offset, fd, bytes) of the next bytes there are, or None. Raises cursor_lost when they were dropped meanwhile."""
        log = self._log
        if self._generation != log.generation:
            detail = {"generation": log.generation, "first": log.first, "end": log.end}
            raise error("rolled_back", f"Generation {self._generation} is over.", detail=detail)
        if self.offset < log.first:
            log.check(self.offset)
        for _ in range(self.RUNS_PER_CALL_MAX):
            if self.offset >= log.end:
                return None
            run, stop = self._run()
            if self._fd is None or run.fd == self._fd:
                data = log.pread(min(stop - self.offset, bytes_max), self.offset)
                at = self.offset
                self.offset += len(data)
                log.reader_moved()
                return at, run.fd, data
            self.offset = stop
        return (self.offset, self._fd or STDOUT, b"")  # many runs of the other one: let others have a turn

    def _run(self) -> tuple[Run, int]:
        """The run at `offset`, and where it stops (as far as is known now)."""
        log = self._log
        if self._number < 0:
            self._load(log.find_run(self.offset))
        while True:
            here = self._number - self._base
            if here + 1 >= len(self._runs) and self._number + 1 < log.runs:
                self._load(self._number)
                here = 0
            following = self._runs[here + 1].offset if here + 1 < len(self._runs) else log.end
            if self.offset < following:
                return self._runs[here], following
            self._number += 1

    def _load(self, number: int) -> None:
        self._base = self._number = number
        self._runs = self._log.runs_at(number, self.RUNS_AHEAD)
