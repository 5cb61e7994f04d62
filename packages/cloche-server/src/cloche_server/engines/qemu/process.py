"""The VMM's process as the daemon holds it: the keeper ends it, its cgroup measures it, its pidfd says when it died."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final

from cloche_server.engines.contract import EngineError, InstanceStats, ProcessEnd
from cloche_server.keeper.client import Attached, Ended, KeeperClient, KeeperGone, KeeperRefused

KILL_TRIES: Final = 3
KILL_AGAIN_S: Final = 1.0
STATUS_BYTES_MAX: Final = 16 * 1024


class Process:
    """One VMM. `keeper` is a function, because a keeper can be replaced while the daemon runs."""

    def __init__(self, attached: Attached, keeper: Callable[[], KeeperClient]) -> None:
        self._held = attached.held
        self._pidfd = attached.pidfd
        self._keeper = keeper
        self._dead: asyncio.Future[None] | None = None
        self._killing: asyncio.Task[ProcessEnd] | None = None
        self._reaped: int | None = None
        self._last = InstanceStats(0.0, 0, 0)

    @property
    def pid(self) -> int:
        return self._held.pid

    def stats(self) -> InstanceStats:
        """The last known values once its cgroup is gone."""
        if self._held.cgroup is not None:
            try:
                usage = self._held.cgroup.usage()
            except OSError:
                return self._last
            extra = {"oom_kills": usage.oom_kills}
            self._last = InstanceStats(usage.cpu_s, usage.memory_bytes, usage.memory_peak_bytes, extra)
        return self._last

    async def wait_dead(self) -> None:
        if self._dead is None:
            loop = asyncio.get_running_loop()
            self._dead = loop.create_future()
            if self._pidfd < 0:
                self._dead.set_result(None)
            else:
                loop.add_reader(self._pidfd, self._died)
        await asyncio.shield(self._dead)

    async def kill(self) -> ProcessEnd:
        if self._killing is None or (self._killing.done() and self._killing.exception() is not None):
            self._killing = asyncio.create_task(self._kill())
        return await asyncio.shield(self._killing)

    def _died(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._reap()
        if self._dead is not None and not self._dead.done():
            self._dead.set_result(None)

    def _reap(self) -> None:
        """It is this process's child only if its keeper died before it (the daemon is a subreaper)."""
        try:
            found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return
        if found is not None:
            self._reaped = found.si_status << 8 if found.si_code == os.CLD_EXITED else found.si_status

    async def _kill(self) -> ProcessEnd:
        ended = await self._kill_by_keeper()
        await self.wait_dead()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        return ProcessEnd(ended.oom_kills, self._reaped if ended.status is None else ended.status)

    async def _kill_by_keeper(self) -> Ended:
        """A keeper can die under the request; its successor knows the sandbox by its record."""
        for _ in range(KILL_TRIES):
            try:
                return await self._keeper().kill(self._held.id)
            except KeeperGone:
                await asyncio.sleep(KILL_AGAIN_S)
            except KeeperRefused as error:
                raise EngineError("keeper_failed", error.message) from None
        raise EngineError("keeper_failed", f"no keeper could end {self._held.id}")


def host_uid(pid: int) -> int | None:
    """The process's uid, as its own status says now; None when it is dead."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            status = file.read(STATUS_BYTES_MAX)
    except OSError:
        return None
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "Uid":
            return int(value.split()[1])
    return None
