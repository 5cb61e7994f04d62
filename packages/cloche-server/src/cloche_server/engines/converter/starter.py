"""Starts converters for the daemon: one worker for one job, behind the keeper's walls (`images.worker.Starter`)."""

from __future__ import annotations

import os
import socket
from typing import Final

from cloche.wire.errors import TABLE, ClocheError, error
from cloche.wire.ids import DEFAULT_TENANT, new_id
from cloche_server.engines import process
from cloche_server.engines.contract import EngineError
from cloche_server.engines.converter import command
from cloche_server.engines.spec import SandboxSpec
from cloche_server.keeper.client import Attached

ENGINE: Final = "converter"
OWNER: Final = "node"
PROCESSES: Final = 16
"""The worker, mkfs and their threads; the keeper's net is a multiple of it."""


class Worker:
    """One converter that waits for its job, or works on it."""

    def __init__(self, attached: Attached, keeper: process.Keeper, live: set[str]) -> None:
        self.channel: socket.socket = attached.channel
        self._id = attached.held.id
        self._log = attached.control
        self._log.setblocking(False)
        self._process = process.Process(attached, keeper)
        self._live = live

    @property
    def id(self) -> str:
        return self._id

    @property
    def pid(self) -> int:
        return self._process.pid

    def last_words(self) -> str:
        """What it wrote to stderr and nobody has read yet: hostile text."""
        return process.last_words(self._log)

    async def kill(self) -> int:
        """Everything of it is gone afterwards; how often the kernel killed in it for memory. Can be called again."""
        try:
            ended = await self._process.kill()
        except EngineError as bad:
            raise _public(bad) from bad
        self._live.discard(self._id)
        self.channel.close()
        self._log.close()
        return ended.oom_kills


class ConverterStarter:
    """`keeper` is a function, because a keeper can be replaced while the daemon runs."""

    def __init__(self, keeper: process.Keeper) -> None:
        self._keeper = keeper
        self.live: set[str] = set()
        """The ids under which the keeper knows those that this daemon started: all others of the kind are left over."""

    async def __call__(self, *, memory_bytes: int, disk_bytes: int) -> Worker:
        spec = SandboxSpec(
            id=new_id("sandbox"),
            tenant=DEFAULT_TENANT,
            owner=OWNER,
            lineage=new_id("lineage"),
            engine=ENGINE,
            image_file="",
            cpus=float(os.cpu_count() or 1),
            memory_bytes=memory_bytes,
            processes=PROCESSES,
            disk_bytes=disk_bytes,
            open_files=command.OPEN_FILES_MIN,
        ).check()
        self.live.add(spec.id)
        try:
            return Worker(await process.boot(self._keeper, spec), self._keeper, self.live)
        except BaseException as bad:
            self.live.discard(spec.id)
            if isinstance(bad, EngineError):
                raise _public(bad) from bad
            raise


def _public(bad: EngineError) -> ClocheError:
    code = bad.code if bad.code in TABLE else "create_failed"
    return error(code, f"The image converter: {bad}", detail={"reason": bad.code})
