"""Starts interceptors for the daemon, behind the keeper's walls (`egress.interception.supervisor.Starter`)."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Final

from cloche.wire.errors import ClocheError, error
from cloche.wire.ids import new_id
from cloche_server.engines import process
from cloche_server.engines.contract import EngineError
from cloche_server.engines.spec import SandboxSpec
from cloche_server.keeper.client import Attached

ENGINE: Final = "interceptor"
OWNER: Final = "node"
MIB: Final = 1024 * 1024
MEMORY_BYTES: Final = 256 * MIB
PROCESSES: Final = 16
"""Its threads count too."""
OPEN_FILES: Final = 4096
"""Two for each connection."""
DISK_BYTES: Final = MIB
"""It writes nothing (`command.plan`); a spec has to say something."""
CPUS: Final = 1.0


class Running:
    """One interceptor."""

    def __init__(self, attached: Attached, keeper: process.Keeper) -> None:
        self.channel: socket.socket = attached.channel
        self.channel.setblocking(False)
        self._id = attached.held.id
        self._log = attached.control
        self._log.setblocking(False)
        self._process = process.Process(attached, keeper)

    @property
    def id(self) -> str:
        return self._id

    @property
    def pid(self) -> int:
        return self._process.pid

    def last_words(self) -> str:
        """What it wrote to stderr and nobody has read yet: hostile text."""
        return process.last_words(self._log)

    async def wait_dead(self) -> None:
        await self._process.wait_dead()

    async def kill(self) -> int:
        """Everything of it is gone afterwards; how often the kernel killed in it for memory. Can be called again."""
        try:
            ended = await self._process.kill()
        except EngineError as bad:
            raise _public(bad) from bad
        self.channel.close()
        self._log.close()
        return ended.oom_kills


class InterceptorStarter:
    """`keeper` is a function, because a keeper can be replaced while the daemon runs.

    `before` sees to it that the keeper in office shows an interceptor what it needs: one that was started before Python was
    installed does not.
    """

    def __init__(
        self,
        keeper: process.Keeper,
        *,
        before: Callable[[], Awaitable[None]] | None = None,
        memory_bytes: int = MEMORY_BYTES,
        processes: int = PROCESSES,
        cpus: float = CPUS,
    ) -> None:
        self._keeper = keeper
        self._before = before or _nothing
        self._memory_bytes = memory_bytes
        self._processes = processes
        self._cpus = cpus

    async def __call__(self, *, tenant: str, environment: str) -> Running:
        spec = SandboxSpec(
            id=new_id("sandbox"),
            tenant=tenant,
            owner=OWNER,
            lineage=new_id("lineage"),
            engine=ENGINE,
            image_file=environment,
            cpus=self._cpus,
            memory_bytes=self._memory_bytes,
            processes=self._processes,
            disk_bytes=DISK_BYTES,
            open_files=OPEN_FILES,
        ).check()
        try:
            await self._before()
            return Running(await process.boot(self._keeper, spec), self._keeper)
        except EngineError as bad:
            raise _public(bad) from bad


async def _nothing() -> None:
    """The keeper is as it is."""


def _public(bad: EngineError) -> ClocheError:
    return error(
        "interceptor_missing",
        f"The interceptor cannot be started: {bad}",
        detail={"reason": bad.code},
        fix="See why: cloche doctor; cloche node logs",
    )
