"""A node over the native engine and a clock that tests move, with what most tests do to it."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from cloche.wire.commands import Command, Cursor, StartCommand
from cloche.wire.errors import ClocheError
from cloche.wire.ids import DEFAULT_TENANT
from cloche.wire.sandboxes import CreateSandbox, Sandbox
from cloche_server.api.backend import Backend, Caller, OutputChunk
from cloche_server.node.admission import Watermarks
from cloche_server.node.node import Config, Node
from tests.unit.node.fake_clock import FakeClock
from tests.unit.node.native_engine import NativeEngine

ME = Caller(DEFAULT_TENANT, "uid:1000")
OTHER = Caller(DEFAULT_TENANT, "uid:1001")
ADMIN = Caller(DEFAULT_TENANT, "uid:0", is_admin=True)


def make_images(root: Path) -> Path:
    """One image's description; the native engine needs no more of it."""
    directory = root / "images"
    directory.mkdir()
    (directory / "python.erofs").touch()
    config = {"User": "0:0", "Env": [f"PATH={os.environ['PATH']}"], "WorkingDir": "/tmp"}
    (directory / "python.json").write_text(json.dumps({"config": config, "content": {"sha256": "ab"}}))
    return directory


class House:
    """A node and its engine, for one test."""

    def __init__(self, root: Path, images: Path, **marks: int) -> None:
        self.root = root
        self.engine = NativeEngine()
        self.clock = FakeClock()
        config = Config(root / "state", images, marks=Watermarks(**{"disk_free_bytes_min": 0, **marks}))
        self.node = Node(config, {"gvisor": self.engine}, self.clock)

    def is_backend(self) -> Backend:
        return self.node

    async def create(self, **more: object) -> Sandbox:
        return await self.node.create(ME, CreateSandbox(limits={"disk_bytes": 1 << 24}, **more), None)  # type: ignore[arg-type]

    async def run(self, sandbox: str, *argv: str, **more: object) -> Command:
        command = await self.node.start_command(ME, sandbox, StartCommand(argv=list(argv), **more), None)  # type: ignore[arg-type]
        return await self.node.wait_command(ME, sandbox, command.id, 20)

    async def text(self, command: Command, fd: int | None = None, start: int = 0) -> bytes:
        return b"".join([bytes(chunk.data) for chunk in await self.chunks(command, fd, start)])

    async def chunks(self, command: Command, fd: int | None = None, start: int = 0) -> list[OutputChunk]:
        found = self.node.output(ME, command.sandbox, command.id, Cursor(offset=start), follow=True, fd=fd)
        return [chunk async for chunk in found]


async def raises(code: str, work: object) -> ClocheError:
    with pytest.raises(ClocheError) as failed:
        await work  # type: ignore[misc]
    assert failed.value.code == code, failed.value
    return failed.value


async def once(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)
