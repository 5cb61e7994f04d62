"""One thread, one selector, tasks as generators: several boots at once without threads or asyncio's memory.

A task yields what it waits for and is resumed with the answer: `Readable` → True (or False when the time is over),
`Exit` → the wait status of a child (or None when the time is over), `Sleep` → None.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Readable:
    """Wait for a descriptor."""

    fd: int
    timeout_s: float


@dataclass(frozen=True)
class Exit:
    """Wait for a child."""

    pid: int
    timeout_s: float


@dataclass(frozen=True)
class Sleep:
    """Wait for time."""

    timeout_s: float


Wait = Readable | Exit | Sleep
Task = Generator[Wait, Any, None]


class Loop:
    """Runs tasks and descriptor callbacks, and reaps every child (the keeper is a subreaper)."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._exits: dict[int, Callable[[int | None], None]] = {}
        self._statuses: dict[int, int] = {}
        self._running = True
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        self.watch(self._wake_in, self._woken)
        while self._running:
            timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for key, _ in self._selector.select(timeout):
                if key.fd in self._selector.get_map():  # an earlier callback of this round may have closed it
                    key.data()
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()

    def stop(self) -> None:
        self._running = False

    def watch(self, fd: int, ready: Callable[[], None], *, write: bool = False) -> None:
        events = selectors.EVENT_WRITE if write else selectors.EVENT_READ
        self._selector.register(fd, events, ready)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def expect(self, pid: int) -> None:
        """Keep this child's wait status when it ends, even before a task asks for it."""
        self._statuses.setdefault(pid, -1)

    def take_status(self, pid: int) -> int | None:
        """The status of an expected child that has ended."""
        status = self._statuses.pop(pid, -1)
        return None if status == -1 else status

    def start(self, task: Task) -> None:
        self._resume(task, None)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), call))

    def reap(self) -> None:
        while True:
            try:
                result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                return
            if result is None:
                return
            # As waitpid gives it: exit code in the high byte, or the signal.
            status = result.si_status << 8 if result.si_code == os.CLD_EXITED else result.si_status
            waiting = self._exits.pop(result.si_pid, None)
            if waiting is not None:
                self._statuses.pop(result.si_pid, None)
                waiting(status)
            elif result.si_pid in self._statuses:
                self._statuses[result.si_pid] = status

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_in, 4096)
        self.reap()

    def _resume(self, task: Task, value: Any) -> None:
        try:
            wait = task.send(value)
        except StopIteration:
            return
        once = _Once(lambda result: self._resume(task, result))
        if isinstance(wait, Readable):
            fd = wait.fd

            def ready(result: bool) -> None:
                if not once.done:
                    self.unwatch(fd)
                    once(result)

            self.watch(fd, lambda: ready(True))
            self.later(wait.timeout_s, lambda: ready(False))
        elif isinstance(wait, Exit):
            status = self.take_status(wait.pid)
            if status is not None:
                self.later(0, lambda: once(status))
                return
            self._exits[wait.pid] = once
            self.later(wait.timeout_s, lambda: once(None))
        else:
            self.later(wait.timeout_s, lambda: once(None))


class _Once:
    """A task goes on once, whichever of event and time-out comes first."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self._call = call
        self.done = False

    def __call__(self, value: Any) -> None:
        if not self.done:
            self.done = True
            self._call(value)
