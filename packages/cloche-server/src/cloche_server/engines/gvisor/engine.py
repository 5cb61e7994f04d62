"""`contract.Engine` and `contract.Instance` for gVisor, in the daemon: the keeper acts, this asks."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cloche_server.engines.contract import (
    Capabilities,
    EngineError,
    InstanceStats,
    IsolationReport,
    ProcessEnd,
)
from cloche_server.engines.gvisor.control import Control
from cloche_server.engines.spec import SandboxSpec
from cloche_server.keeper.client import Attached, Ended, KeeperClient, KeeperGone, KeeperRefused

NAME: Final = "gvisor"
ISOLATION_CLASS: Final = "gvisor"
FLOOR: Final = 20260905
"""The oldest release whose walls were measured; an older one has known escapes or other flags."""
_RELEASE: Final = re.compile(r"release-(\d{8})\.\d+")
_REFUSALS: Final = {
    "image_not_found": "image_not_found",
    "image_unreadable": "image_not_found",
    "engine_missing": "engine_missing",
    "overloaded": "overloaded",
    "no_slot": "overloaded",
    "busy": "node_busy",
}
KILL_TRIES: Final = 3


def release_of(version_text: str) -> str:
    """`release-YYYYMMDD.N` from what `runsc --version` prints; EngineError when it is none or too old."""
    found = _RELEASE.search(version_text)
    if found is None:
        raise EngineError("engine_too_old", f"runsc says {version_text[:80]!r}, which names no release")
    if int(found[1]) < FLOOR:
        raise EngineError("engine_too_old", f"runsc is {found[0]}; the floor is release-{FLOOR}")
    return found[0]


def read_release(binary: Path) -> str:
    try:
        done = subprocess.run([str(binary), "--version"], capture_output=True, text=True, timeout=20, check=False)
    except OSError as error:
        raise EngineError("engine_missing", f"{binary}: {error.strerror}") from None
    return release_of(done.stdout + done.stderr)


def digest_of(binary: Path) -> str:
    with open(binary, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class GVisorEngine:
    """Made once a daemon. `keeper` is a function, because a keeper can be replaced while the daemon runs."""

    def __init__(self, binary: Path, keeper: Callable[[], KeeperClient], weaker: tuple[str, ...] = ()) -> None:
        self._version = read_release(binary)
        self._digest = digest_of(binary)
        self._keeper = keeper
        self._weaker = weaker

    @property
    def name(self) -> str:
        return NAME

    @property
    def version(self) -> str:
        return self._version

    @property
    def digest(self) -> str:
        return self._digest

    def capabilities(self) -> Capabilities:
        return Capabilities(isolation_class=ISOLATION_CLASS, pause=True)

    async def boot(self, spec: SandboxSpec) -> GVisorInstance:
        try:
            attached = await self._keeper().boot(spec)
        except KeeperRefused as error:
            raise EngineError(_REFUSALS.get(error.code, "create_failed"), error.message) from None
        except KeeperGone as error:
            raise EngineError("keeper_failed", str(error)) from None
        except asyncio.CancelledError:
            # The keeper finishes the boot for nobody: end it when that is possible again.
            await asyncio.shield(self._forget(spec.id))
            raise
        return self._instance(attached)

    async def adopt(self, spec: SandboxSpec) -> GVisorInstance | None:
        try:
            attached = await self._keeper().attach(spec.id)
        except KeeperRefused as error:
            if error.code not in ("not_found", "not_live", "dead", "no_channel", "no_control"):
                raise EngineError("keeper_failed", error.message) from None
            await self._forget(spec.id)
            return None
        except KeeperGone as error:
            raise EngineError("keeper_failed", str(error)) from None
        return self._instance(attached)

    async def _forget(self, sandbox: str) -> None:
        try:
            await self._keeper().kill(sandbox)
        except (KeeperGone, KeeperRefused):
            return  # a successor keeper undoes boots that nobody finished; the daemon's adoption finds the rest

    def _instance(self, attached: Attached) -> GVisorInstance:
        held = attached.held
        report = IsolationReport(
            isolation_class=ISOLATION_CLASS,
            engine=NAME,
            version=self._version,
            digest=self._digest,
            host_uid=held.host_uid,
            cgroup=None if held.cgroup is None else held.cgroup.main,
            weaker=self._weaker,
        )
        return GVisorInstance(attached, report, self._keeper)


class GVisorInstance:
    """One live sandbox under a sentry of its own."""

    def __init__(self, attached: Attached, report: IsolationReport, keeper: Callable[[], KeeperClient]) -> None:
        self._held = attached.held
        self._channel = attached.channel
        self._control = Control(attached.control, attached.held.id)
        self._pidfd = attached.pidfd
        self._report = report
        self._keeper = keeper
        self._dead: asyncio.Future[None] | None = None
        self._killing: asyncio.Task[ProcessEnd] | None = None
        self._reaped: int | None = None
        self._last = InstanceStats(0.0, 0, 0)

    @property
    def id(self) -> str:
        return self._held.id

    @property
    def channel(self) -> socket.socket:
        return self._channel

    @property
    def pid(self) -> int:
        return self._held.pid

    def isolation(self) -> IsolationReport:
        return self._report

    async def start(self) -> None:
        await self._control.start_root()

    async def seal(self) -> None:
        try:
            await self._keeper().seal(self.id)
        except KeeperRefused as error:
            raise EngineError("create_failed", error.message) from None
        except KeeperGone as error:
            raise EngineError("keeper_failed", str(error)) from None

    async def pause(self) -> None:
        await self._control.pause()

    async def resume(self) -> None:
        await self._control.resume()

    def stats(self) -> InstanceStats:
        """From the host's cgroup, not from the guest; the last known values once it is gone."""
        if self._held.cgroup is not None:
            try:
                usage = self._held.cgroup.usage()
            except OSError:  # the cgroup is gone with the sandbox
                return self._last
            self._last = InstanceStats(
                usage.cpu_s, usage.memory_bytes, usage.memory_peak_bytes, {"oom_kills": usage.oom_kills}
            )
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

    def _died(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._reap()
        if self._dead is not None and not self._dead.done():
            self._dead.set_result(None)

    def _reap(self) -> None:
        """Only after its keeper died is the sentry this process's child (the daemon is a subreaper)."""
        try:
            found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return
        if found is not None:
            self._reaped = found.si_status << 8 if found.si_code == os.CLD_EXITED else found.si_status

    async def kill(self) -> ProcessEnd:
        if self._killing is None or (self._killing.done() and self._killing.exception() is not None):
            self._killing = asyncio.create_task(self._kill())
        return await asyncio.shield(self._killing)

    async def _kill(self) -> ProcessEnd:
        ended = await self._kill_by_keeper()
        await self.wait_dead()
        self._control.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        return ProcessEnd(ended.oom_kills, self._reaped if ended.status is None else ended.status)

    async def _kill_by_keeper(self) -> Ended:
        """A keeper can die under the request; its successor knows the sandbox by its record."""
        for _ in range(KILL_TRIES):
            try:
                return await self._keeper().kill(self.id)
            except KeeperGone:
                await asyncio.sleep(1.0)
            except KeeperRefused as error:
                raise EngineError("keeper_failed", error.message) from None
        raise EngineError("keeper_failed", f"no keeper could end {self.id}")
