"""The agenda: one heap of deadlines on the boot clock, and one timer of the loop, for the whole node.

The loop's own clock stops while a laptop sleeps, so the timer looks at least every `LOOK_S`: a deadline that passed during a
sleep is noticed that soon after waking. Fifty idle sandboxes are fifty entries and no task.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Final

from cloche_server.node.clock import NS, Clock

LOOK_S: Final = 2.0
DUE_PER_TURN_MAX: Final = 64
CANCELLED_MAX: Final = 512
"""A command's time-out is mostly cancelled long before it is due: beyond this, and half of the heap, they are swept."""


class Entry:
    """One deadline; `cancel` makes it do nothing."""

    __slots__ = ("_agenda", "action", "at_ns")

    def __init__(self, agenda: Agenda, at_ns: int, action: Callable[[], None]) -> None:
        self._agenda = agenda
        self.at_ns = at_ns
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        if self.action is not None:
            self.action = None
            self._agenda.forget_one()


class Agenda:
    """`at` plans; `run_due` is also for tests with a clock of their own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[int, int, Entry]] = []
        self._count = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._stopped = False
        self._cancelled = 0

    def __len__(self) -> int:
        return sum(entry.action is not None for _, _, entry in self._heap)

    def at(self, at_ns: int, action: Callable[[], None]) -> Entry:
        """`action` is synchronous and short: it starts what takes time."""
        entry = Entry(self, at_ns, action)
        heapq.heappush(self._heap, (at_ns, next(self._count), entry))
        self._arm()
        return entry

    def after(self, delay_s: float, action: Callable[[], None]) -> Entry:
        return self.at(self._clock.boot_ns() + int(delay_s * NS), action)

    def forget_one(self) -> None:
        self._cancelled += 1
        if self._cancelled > CANCELLED_MAX and self._cancelled * 2 > len(self._heap):
            self._heap = [item for item in self._heap if item[2].action is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def run_due(self) -> int:
        """Does what is due, at most a bounded number at once; how many that was."""
        now, done = self._clock.boot_ns(), 0
        try:
            while self._heap and done < DUE_PER_TURN_MAX:
                at_ns, _, entry = self._heap[0]
                if entry.action is not None and at_ns > now:
                    break
                heapq.heappop(self._heap)
                if entry.action is None:
                    self._cancelled = max(0, self._cancelled - 1)
                    continue
                done += 1
                action, entry.action = entry.action, None
                action()
        finally:
            self._arm()
        return done

    def _arm(self) -> None:
        if self._stopped or not self._heap:
            return
        first_ns = self._heap[0][0]
        if self._timer is not None:
            if first_ns >= self._timer_ns:
                return
            self._timer.cancel()
        now = self._clock.boot_ns()
        delay_s = min(LOOK_S, max(0.0, (first_ns - now) / NS))
        self._timer_ns = first_ns
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        self.run_due()
