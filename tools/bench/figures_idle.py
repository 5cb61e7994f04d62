"""What fifty sandboxes that do nothing cost the node itself: daemon and keeper, not the guests."""

import contextlib
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from cloche.wire.defaults import MIB
from tests.promises.nodes import RealNode, real_node
from tools.bench.figure import figure
from tools.bench.lean import Connection

SANDBOXES = 50
AT_ONCE = 4
SMALL = {"limits": {"memory_bytes": 64 * MIB, "disk_bytes": 64 * MIB}}
SETTLE_S = 1.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def create(node: RealNode, count: int) -> None:
    """So many small sandboxes, a few at a time, on connections that are closed again."""

    def one(_: int) -> None:
        connection = Connection(node.paths.api_socket)
        with contextlib.closing(connection):
            connection.ask("POST", "/v1/sandboxes", SMALL)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, range(count)))
    time.sleep(SETTLE_S)


def memory_bytes(*pids: int) -> int:
    """Proportional set size: a page that two processes share counts half for each."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def cpu_s(*pids: int) -> float:
    """User and system time so far."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(each[11]) + int(each[12]) for each in fields) / TICKS_PER_S


@figure("idle_memory", unit="MB", at_most=1.0, samples_ci=1, warm_up=False)
class IdleMemory:
    """Megabytes of daemon and keeper for each idle sandbox beyond the first. A fresh node each time."""

    def ours(self) -> float:
        with real_node() as node:
            pids = (node.pid, node.keeper_pid())
            create(node, 1)
            one = memory_bytes(*pids)
            create(node, SANDBOXES - 1)
            return (memory_bytes(*pids) - one) / (SANDBOXES - 1) / 1e6


@figure("idle_cpu", unit="%", at_most=5.0, samples_ci=10)
class IdleCpu:
    """Per cent of one core that daemon and keeper use; each sample is a window that slides on."""

    is_long = False

    def __enter__(self) -> Self:
        self.step_s, window_s = (2.0, 60.0) if self.is_long else (1.0, 20.0)
        with contextlib.ExitStack() as stack:
            node = stack.enter_context(real_node())
            self.pids = (node.pid, node.keeper_pid())
            create(node, SANDBOXES)
            self.stack = stack.pop_all()
        self.readings: deque[tuple[float, float]] = deque(maxlen=int(window_s / self.step_s) + 1)
        while len(self.readings) < (self.readings.maxlen or 0) - 1:
            self.ours()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def ours(self) -> float:
        if self.readings:
            time.sleep(self.step_s)
        self.readings.append((time.perf_counter(), cpu_s(*self.pids)))
        (began, before), (ended, after) = self.readings[0], self.readings[-1]
        return 100 * (after - before) / (ended - began) if ended > began else 0.0
