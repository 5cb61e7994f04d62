"""What a sandbox uses: the host's own counters, and what its agent says where only it can know."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from cloche.wire.sandboxes import Usage
from cloche_server.channel import ChannelError, JsonObject
from cloche_server.node.clock import NS
from cloche_server.node.sandbox import Sandbox

GUEST_S: Final = 1.0


async def of(sandbox: Sandbox, now_ns: int) -> Usage | None:
    """CPU and memory from its cgroup; processes and disk by the guest's word, and None if it does not answer at once."""
    instance = sandbox.instance
    if instance is None:
        return None
    stats = instance.stats()
    before, sandbox.cpu_sample = sandbox.cpu_sample, (now_ns, stats.cpu_s)
    percent = None
    if before is not None and now_ns > before[0]:
        percent = max(0.0, (stats.cpu_s - before[1]) / ((now_ns - before[0]) / NS) * 100)
    said = await _ask(sandbox)
    return Usage(
        cpu_s=stats.cpu_s,
        cpu_percent=percent,
        memory_bytes=stats.memory_bytes,
        memory_peak_bytes=stats.memory_peak_bytes,
        processes=_count(said, "processes"),
        disk_bytes=_count(said, "disk_used_bytes"),
    )


async def _ask(sandbox: Sandbox) -> JsonObject:
    if sandbox.channel is None or not sandbox.was_ready:
        return {}
    try:
        async with asyncio.timeout(GUEST_S):
            ok, _ = await sandbox.channel.call("stats", {})
            return ok
    except (ChannelError, TimeoutError):
        return {}  # shown as unknown


def _count(said: JsonObject, name: str) -> int | None:
    value = said.get(name)
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def bytes_below(directory: Path | None) -> int:
    """On the disk; what may not be read is not counted (the keeper's own directories)."""
    if directory is None:
        return 0
    total = 0
    for base, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(base, name)).st_blocks * 512
            except OSError:
                continue
    return total
