"""The one clock. CLOCK_BOOTTIME goes on while a laptop sleeps; wall time is only displayed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final, Protocol

NS: Final = 1_000_000_000
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """Injectable, so that a test can let hours pass, or the machine sleep."""

    def boot_ns(self) -> int: ...

    def wall_s(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def boot_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def wall_s(self) -> float:
        return time.time()


def boot_id() -> str:
    """Which boot of the machine this is: after another one, no sandbox of before can live."""
    return BOOT_ID.read_text().strip()


def seconds(value_s: float) -> int:
    """Seconds → nanoseconds."""
    return int(value_s * NS)
