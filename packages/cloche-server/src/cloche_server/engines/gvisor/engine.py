"""`contract.Engine` and `contract.Instance` for gVisor, in the daemon: the keeper acts, this asks."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Final

from cloche_server.engines import process
from cloche_server.engines.contract import (
    Capabilities,
    EngineError,
    InstanceStats,
    IsolationReport,
    ProcessEnd,
)
from cloche_server.engines.gvisor.control import Control
from cloche_server.engines.gvisor.export import export
from cloche_server.engines.spec import SandboxSpec
from cloche_server.keeper.client import Attached, KeeperGone, KeeperRefused

NAME: Final = "gvisor"
ISOLATION_CLASS: Final = "gvisor"
FLOOR: Final = 20260905
"""The oldest release whose walls were measured; an older one has known escapes or other flags."""
_RELEASE: Final = re.compile(r"release-(\d{8})\.\d+")


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

    def __init__(self, binary: Path, keeper: process.Keeper, weaker: tuple[str, ...] = ()) -> None:
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
        return Capabilities(isolation_class=ISOLATION_CLASS, pause=True, export_upper=True)

    async def boot(self, spec: SandboxSpec) -> GVisorInstance:
        return self._instance(await process.boot(self._keeper, spec))

    async def adopt(self, spec: SandboxSpec) -> GVisorInstance | ProcessEnd:
        found = await process.adopt(self._keeper, spec.id)
        return found if isinstance(found, ProcessEnd) else self._instance(found)

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

    def __init__(self, attached: Attached, report: IsolationReport, keeper: process.Keeper) -> None:
        self._id = attached.held.id
        self._channel = attached.channel
        self._control = Control(attached.control, attached.held.id)
        self._report = report
        self._keeper = keeper
        self._process = process.Process(attached, keeper)

    @property
    def id(self) -> str:
        return self._id

    @property
    def channel(self) -> socket.socket:
        return self._channel

    @property
    def pid(self) -> int:
        return self._process.pid

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

    async def export_upper(self, sink_fd: int, *, bytes_max: int) -> int:
        pausing = asyncio.create_task(self._control.pause())
        try:
            await asyncio.shield(pausing)
            return await export(self._control, sink_fd, bytes_max)
        finally:
            await asyncio.shield(self._go_on(pausing))

    async def _go_on(self, pausing: asyncio.Task[None]) -> None:
        """Resumes, over a new connection where the old one broke; EngineError when the sentry cannot be brought to it."""
        await asyncio.wait([pausing])
        if pausing.exception() is not None and not self._control.is_closed:
            return  # it refused, and a sentry that is resumed without having been paused panics
        if self._control.is_closed:
            attached = await process.attach(self._keeper, self.id)
            attached.channel.close()
            os.close(attached.pidfd)
            self._control = Control(attached.control, self.id)
        await self._control.resume()

    def stats(self) -> InstanceStats:
        return self._process.stats()

    async def wait_dead(self) -> None:
        await self._process.wait_dead()

    async def kill(self) -> ProcessEnd:
        ended = await self._process.kill()
        self._control.close()
        self._channel.close()  # nobody took it over when a boot failed before HELLO
        return ended
