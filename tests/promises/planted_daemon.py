"""The node daemon with faults planted: `planted_daemon.py PLANT-DIRECTORY <the daemon's own arguments>`.

`plants.PlantedNode` copies this file beside the node's state and starts it in the daemon's place; the product knows nothing
of it. In the directory:
    fault          `POINT NUMBER`: the daemon kills itself (SIGKILL) when it passes that point for the NUMBERth time; renamed
                   to `taken` then, so it happens once. Points are `cloche_server.points`' and two of our own,
                   `channel.frame.out` and `channel.frame.in`: in the middle of a frame that is being sent or received.
    constants.json `{"module:NAME": value}`, set before the daemon begins.
    clock.json     `{"boot_s": n, "wall_s": n}`: by how much the machine's clocks have jumped; read at each look.
SIGUSR2 tells the keeper to go, as an upgrade of it would; the daemon puts a successor in its place.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloche_server import points
from cloche_server.channel import pump
from cloche_server.node import clock, main
from cloche_server.node.launch import keepers

PLANT = Path(sys.argv.pop(1))
passed = 0


def reached(point: str) -> None:
    global passed
    try:
        wanted, number = (PLANT / "fault").read_text().split()
    except FileNotFoundError:
        return
    if wanted == point:
        passed += 1
        if passed >= int(number):
            die()


def die() -> None:
    os.rename(PLANT / "fault", PLANT / "taken")
    os.kill(os.getpid(), signal.SIGKILL)


def cut_when_sending(write: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def _write(self: Any) -> bool:
        if self.outbox.bytes > 8192:
            whole = b"".join(self.outbox.iovecs(pump.WRITE_BYTES))
            cut = whole[: random.randrange(1, len(whole))]
            if _is_due("channel.frame.out") and self._sock.send(cut):
                die()
        return write(self)

    return _write


def _is_due(point: str) -> bool:
    try:
        return (PLANT / "fault").read_text().split()[0] == point
    except FileNotFoundError:
        return False


def cut_when_receiving(decode: Callable[..., int]) -> Callable[..., int]:
    def _decode(self: Any, *arguments: Any) -> int:
        useful = decode(self, *arguments)
        if self._search is None and self._decoder._kept:
            reached("channel.frame.in")
        return useful

    return _decode


class JumpedTime:
    """Stands where the clock's module has `time`: each clock is the machine's own, and what it jumped."""

    CLOCK_BOOTTIME = time.CLOCK_BOOTTIME

    def clock_gettime_ns(self, which: int) -> int:
        jumped_s = _jumped("boot_s") if which == time.CLOCK_BOOTTIME else 0.0
        return time.clock_gettime_ns(which) + int(jumped_s * 1e9)

    def time(self) -> float:
        return time.time() + _jumped("wall_s")


def _jumped(which: str) -> float:
    try:
        return float(json.loads((PLANT / "clock.json").read_text())[which])
    except FileNotFoundError:
        return 0.0


def leave_on_signal(watch: Callable[..., Any]) -> Callable[..., Any]:
    async def _watch(self: Any, channels: Any) -> None:
        asked = set()
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGUSR2, lambda: asked.add(asyncio.ensure_future(self.client.stop()))
        )
        await watch(self, channels)

    return _watch


def plant() -> None:
    points.reached = reached
    pump.Pump._write = cut_when_sending(pump.Pump._write)  # type: ignore[method-assign]
    pump.Pump._decode = cut_when_receiving(pump.Pump._decode)  # type: ignore[method-assign]
    clock.time = JumpedTime()  # type: ignore[assignment]
    keepers.KeeperHouse.watch = leave_on_signal(keepers.KeeperHouse.watch)  # type: ignore[method-assign]
    for name, value in json.loads((PLANT / "constants.json").read_text()).items():
        module, _, attribute = name.partition(":")
        owner = importlib.import_module(module)
        assert hasattr(owner, attribute), name
        setattr(owner, attribute, value)


plant()
sys.exit(main.main())
