"""May one more sandbox be made? Watermarks over facts: pure, and never about one that already runs."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche.wire.defaults import GIB, MIB
from cloche.wire.errors import error

RETRY_AFTER_S: Final = 5.0
DESCRIPTORS_PER_SANDBOX: Final = 16
"""Channel, pidfd, control socket, and room for a few commands with two files each."""
MEMINFO: Final = Path("/proc/meminfo")


@dataclass(frozen=True)
class Watermarks:
    """Below these a create is refused; each has its own name in the message."""

    disk_free_bytes_min: int = GIB
    memory_free_bytes_min: int = 256 * MIB
    memory_per_sandbox_bytes: int = 48 * MIB
    """What a sandbox costs at once, before its program asks for anything: sentry, agent, page cache of its start."""
    descriptors_free_min: int = 64
    log_bytes_max: int = 64 * GIB
    sandboxes_max: int = 1000


@dataclass(frozen=True)
class Use:
    """What the machine has and what is promised of it."""

    sandboxes: int
    disk_free_bytes: int
    disk_reserved_bytes: int
    """Promised to sandboxes that live, and not yet written."""
    memory_free_bytes: int
    descriptors_used: int
    descriptors_max: int
    log_bytes: int


@dataclass(frozen=True)
class Ask:
    """What one create wants."""

    disk_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Refusal:
    """Which watermark, and in words."""

    what: str
    message: str


def refusal(use: Use, ask: Ask, marks: Watermarks) -> Refusal | None:
    """The first watermark that says no, or None."""
    if use.sandboxes >= marks.sandboxes_max:
        return Refusal("sandboxes", f"{use.sandboxes} sandboxes live here and {marks.sandboxes_max} is the most")
    free = use.disk_free_bytes - use.disk_reserved_bytes - ask.disk_bytes
    if free < marks.disk_free_bytes_min:
        return Refusal(
            "disk",
            f"{_mib(use.disk_free_bytes)} of disk are free, {_mib(use.disk_reserved_bytes)} of them promised; "
            f"this one asks for {_mib(ask.disk_bytes)} and {_mib(marks.disk_free_bytes_min)} must stay",
        )
    start = min(ask.memory_bytes, marks.memory_per_sandbox_bytes)
    if use.memory_free_bytes - start < marks.memory_free_bytes_min:
        return Refusal(
            "memory",
            f"{_mib(use.memory_free_bytes)} of memory are free and {_mib(marks.memory_free_bytes_min)} must stay",
        )
    if use.descriptors_used + DESCRIPTORS_PER_SANDBOX > use.descriptors_max - marks.descriptors_free_min:
        return Refusal("descriptors", f"{use.descriptors_used} of {use.descriptors_max} descriptors are in use")
    if use.log_bytes >= marks.log_bytes_max:
        return Refusal("log_bytes", f"{_mib(use.log_bytes)} of output are kept; cloche prune frees them")
    return None


def admit(use: Use, ask: Ask, marks: Watermarks) -> None:
    """Raises `overloaded`, with the watermark's name and when to try again."""
    said = refusal(use, ask, marks)
    if said is not None:
        detail = {"watermark": said.what}
        raise error(
            "overloaded", f"No room for another sandbox: {said.message}.", detail=detail, retry_after_s=RETRY_AFTER_S
        )


def _mib(count: int) -> str:
    return f"{count // MIB} MiB"


# ------------------------------------------------------------------------------- reading the machine


def disk_free(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def memory_free(meminfo: Path = MEMINFO) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no MemAvailable in /proc/meminfo")


def descriptors() -> tuple[int, int]:
    """(in use, the limit) of this process."""
    return len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
