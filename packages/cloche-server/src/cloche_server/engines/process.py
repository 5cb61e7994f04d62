"""An engine's process as the daemon holds it: the keeper starts and ends it, its cgroup measures it, its pidfd says when it died.

What every engine shares because the keeper is the same for all of them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Final

from cloche_server.engines.contract import EngineError, InstanceStats, ProcessEnd
from cloche_server.engines.spec import SandboxSpec
from cloche_server.keeper.client import Attached, Ended, KeeperClient, KeeperGone, KeeperRefused

KILL_TRIES: Final = 3
KILL_AGAIN_S: Final = 1.0
STATUS_BYTES_MAX: Final = 16 * 1024
LOG_BYTES_MAX: Final = 64 * 1024
FORGET_TRIES: Final = 75
FORGET_AGAIN_S: Final = 0.2
ATTACH_TRIES: Final = 20
ATTACH_AGAIN_S: Final = 0.1
REFUSALS: Final = {
    "bad_spec": "invalid_request",
    "image_not_found": "image_not_found",
    "image_unreadable": "image_not_found",
    "engine_missing": "engine_missing",
    "overloaded": "overloaded",
    "no_slot": "overloaded",
    "busy": "node_busy",
}
"""The keeper's words for a boot that it refuses → the public table's."""
NOT_ALIVE: Final = ("not_found", "not_live", "dead", "no_channel", "no_control")

Keeper = Callable[[], KeeperClient]
"""A function, because a keeper can be replaced while the daemon runs."""


def last_words(log: socket.socket) -> str:
    """What a bare process wrote to stderr and nobody has read yet: hostile text, and at most so much of it."""
    said = bytearray()
    while len(said) < LOG_BYTES_MAX:
        try:
            piece = log.recv(LOG_BYTES_MAX - len(said))
        except OSError:  # nothing more, or closed already
            break
        if not piece:
            break
        said += piece
    return said.decode(errors="replace")


async def boot(keeper: Keeper, spec: SandboxSpec) -> Attached:
    try:
        return await keeper().boot(spec)
    except KeeperRefused as error:
        raise EngineError(REFUSALS.get(error.code, "create_failed"), error.message) from None
    except KeeperGone as error:
        await asyncio.shield(_forget_by_successor(keeper, spec.id))
        raise EngineError("keeper_failed", str(error)) from None
    except asyncio.CancelledError:
        # The keeper finishes the boot for nobody: end it when that is possible again.
        await asyncio.shield(forget(keeper, spec.id))
        raise


async def adopt(keeper: Keeper, sandbox: str) -> Attached | ProcessEnd:
    """What an earlier daemon booted; when it is dead, how it died, and nothing of it is left."""
    try:
        return await _attach(keeper, sandbox)
    except KeeperRefused as error:
        if error.code not in NOT_ALIVE:
            raise EngineError("keeper_failed", error.message) from None
        return await forget(keeper, sandbox)
    except KeeperGone as error:
        raise EngineError("keeper_failed", str(error)) from None


async def attach(keeper: Keeper, sandbox: str) -> Attached:
    """The descriptors of a living sandbox, again."""
    try:
        return await _attach(keeper, sandbox)
    except KeeperRefused as error:
        code = "host_failure" if error.code in NOT_ALIVE else "keeper_failed"
        raise EngineError(code, error.message) from None
    except KeeperGone as error:
        raise EngineError("keeper_failed", str(error)) from None


async def _attach(keeper: Keeper, sandbox: str) -> Attached:
    """A control socket may have one client at a time: it may not have seen yet that the last one died."""
    for _ in range(ATTACH_TRIES - 1):
        try:
            return await keeper().attach(sandbox)
        except KeeperRefused as error:
            if error.code != "no_control":
                raise
        await asyncio.sleep(ATTACH_AGAIN_S)
    return await keeper().attach(sandbox)


async def forget(keeper: Keeper, sandbox: str) -> ProcessEnd:
    try:
        ended = await keeper().kill(sandbox)
    except (KeeperGone, KeeperRefused):
        # A successor keeper undoes boots that nobody finished; the daemon's adoption finds the rest.
        return ProcessEnd(0, None)
    return ProcessEnd(ended.oom_kills, ended.status)


async def _forget_by_successor(keeper: Keeper, sandbox: str) -> None:
    """A keeper that died after its last step leaves a live sandbox to its successor, and nobody else knows of it."""
    for _ in range(FORGET_TRIES):
        await asyncio.sleep(FORGET_AGAIN_S)
        try:
            await keeper().kill(sandbox)
        except KeeperGone:
            continue
        except KeeperRefused:
            return  # it was undone by the successor
        return


class Process:
    """One sentry or VMM."""

    def __init__(self, attached: Attached, keeper: Keeper) -> None:
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
