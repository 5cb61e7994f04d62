"""Rooms for builds: sandboxes of the node's own, in which the steps of a Dockerfile run (`images.build.protocols`).

A room is a sandbox like any other, with its walls, limits and journal lines. Its owner is the build and no caller, so nobody but
an administrator sees it. It dies with its build: a daemon that finds one of a predecessor's ends it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cloche.wire import defaults
from cloche.wire.commands import Cursor, StartCommand
from cloche.wire.egress import Asked
from cloche.wire.ends import End, EndReason
from cloche.wire.errors import ClocheError, error
from cloche.wire.files import TreeResult
from cloche.wire.ids import new_id
from cloche.wire.sandboxes import CreateSandbox, Limits
from cloche_server.api.backend import Caller
from cloche_server.channel import JsonObject
from cloche_server.engines.contract import EngineError
from cloche_server.images.build.protocols import Found
from cloche_server.images.service import Root
from cloche_server.images.worker import Converter
from cloche_server.node import files, shelf
from cloche_server.node.command import RunningCommand
from cloche_server.node.guest_text import escaped
from cloche_server.node.lifecycle import Cause, Why
from cloche_server.node.making import Maker
from cloche_server.node.roster import Roster
from cloche_server.node.sandbox import Sandbox

OWNER: Final = "build:"
USER: Final = "0:0"
PRIVILEGES: Final = "package-install"
CPUS_MAX: Final = 8.0
PROCESSES: Final = 4096
OPEN_FILES: Final = 65536
OUTPUT_BYTES_MAX: Final = defaults.GIB
"""Of one step; it is on the disk until the room is closed."""
EXPORT_SLACK_BYTES: Final = 64 * defaults.MIB
"""A tar of a layer has headers beside the layer's bytes."""
NODES_OWN: Final = (
    "/.cloche",
    "/run/cloche",
    "/etc/hostname",
    "/etc/hosts",
    "/etc/machine-id",
    "/etc/resolv.conf",
)
"""What the agent makes or covers when it prepares a guest; a build can change none of it."""


@dataclass(frozen=True)
class Builds:
    """What a build needs of the node."""

    maker: Maker
    converter: Converter
    disk_free_bytes: Callable[[], int]


def end_leftovers(roster: Roster) -> None:
    """Rooms that a predecessor's builds had open."""
    for sandbox in list(roster.live.values()):
        if sandbox.record.owner.startswith(OWNER):
            sandbox.end(Cause(Why.KILLED, by="node", detail="its build ended with the last daemon"))


class Workshop:
    """Opens rooms for one build of this caller; `empty` is the file of a root with nothing but the agent."""

    def __init__(
        self, maker: Maker, caller: Caller, empty: Callable[[], Awaitable[str]], egress: Sequence[Asked] = ()
    ) -> None:
        self._maker = maker
        self._caller = Caller(caller.tenant, f"{OWNER}{new_id('sandbox')}")
        self._for = caller
        self._egress = list(egress)
        self._empty = empty

    async def open(self, root_file: str | None, *, disk_bytes: int, memory_bytes: int) -> Room:
        file = await self._empty() if root_file is None else root_file
        limits = Limits(
            cpus=min(CPUS_MAX, float(os.cpu_count() or 1)),
            memory_bytes=memory_bytes,
            disk_bytes=disk_bytes,
            processes=PROCESSES,
            open_files=OPEN_FILES,
        )
        request = CreateSandbox(
            limits=limits,
            ttl_s=defaults.TTL_S_MAX,
            retain_s=0,
            privileges=PRIVILEGES,
            user=USER,
            workdir="/",
            labels={"cloche.build": self._for.owner},
            egress=self._egress,
        )
        root = Root(name="build", file=file, digest=None, user=USER, workdir="/", env={})
        engine = self._maker.engines["gvisor"]
        plan = await self._maker.context.ways.plan(self._for, request)
        return Room(self._maker, await self._maker.create_from(self._caller, request, root, engine, plan))


class Room:
    """One sandbox for the steps of one stage."""

    def __init__(self, maker: Maker, sandbox: Sandbox) -> None:
        self._store = maker.context.store
        self._sandbox = sandbox

    @property
    def drop(self) -> Sequence[str]:
        return NODES_OWN

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: dict[str, str],
        user: str,
        workdir: str,
        stdin: bytes | None,
        on_output: Callable[[int, bytes], None],
        timeout_s: float,
    ) -> int:
        request = StartCommand(
            argv=list(argv),
            env=env,
            user=user,
            cwd=workdir,
            stdin=stdin is not None,
            timeout_s=timeout_s,
            output_bytes_max=OUTPUT_BYTES_MAX,
        )
        async with self._sandbox.call():
            command = self._sandbox.start_command(request, None)
            assert isinstance(command, RunningCommand), "it has no key, so it is new"
            feeding = asyncio.ensure_future(_feed(command, stdin)) if stdin is not None else None
            try:
                async for chunk in shelf.read(command.log, Cursor(), follow=True, fd=None):
                    on_output(chunk.fd, bytes(chunk.data))
                return _code(await asyncio.shield(command.ended))
            finally:
                if feeding is not None:
                    feeding.cancel()
                    await asyncio.wait([feeding])
                if not command.ended.done():
                    await asyncio.shield(asyncio.ensure_future(command.kill(self._sandbox.record.owner)))

    async def stat(self, path: str) -> Found | None:
        async with self._sandbox.call() as channel:
            try:
                ok = await files.ask(channel, "fs.stat", _fields(path, follow=True))
            except ClocheError as refused:
                if refused.code in ("path_not_found", "not_a_directory"):
                    return None
                raise
        entry = ok.get("entry")
        kind = entry.get("type") if isinstance(entry, dict) else None
        return Found("dir" if kind == "dir" else "file" if kind == "file" else "other", path)

    async def read_file(self, path: str, bytes_max: int) -> bytes | None:
        found = bytearray()
        async with self._sandbox.call() as channel:
            try:
                async for piece in files.read_bytes(channel, "file.read", _fields(path, length=bytes_max)):
                    found += piece
            except ClocheError as refused:
                if refused.code in ("path_not_found", "not_a_directory"):
                    return None
                raise
        return bytes(found[:bytes_max])

    async def make_directory(self, path: str) -> None:
        async with self._sandbox.call() as channel:
            await files.ask(channel, "fs.mkdir", _fields(path, parents=True, mode=0o755))

    async def put_tree(self, path: str, tar: AsyncIterator[bytes]) -> None:
        async with self._sandbox.call() as channel:
            fields = _fields(path, overwrite=True, owners=True)
            _check(files.tree_result(await files.ask(channel, "tree.write", fields, data=tar)), path)

    async def get_tree(self, path: str) -> AsyncIterator[bytes]:
        result: list[JsonObject] = []
        async with self._sandbox.call() as channel:
            async for piece in files.read_bytes(channel, "tree.read", _fields(path), result=result):
                yield piece
        _check(files.tree_result(result[0]), path)

    async def export(self, sink_fd: int) -> None:
        async with self._sandbox.call():
            assert self._sandbox.instance is not None, "it runs"
            bytes_max = int(self._sandbox.record.limits["disk_bytes"]) + EXPORT_SLACK_BYTES
            try:
                await self._sandbox.instance.export_upper(sink_fd, bytes_max=bytes_max)
            except EngineError as bad:
                raise error("build_failed", f"The layer could not be read: {escaped(str(bad))}.") from bad

    async def close(self) -> None:
        self._sandbox.end(Cause(Why.KILLED, by=self._sandbox.record.owner))
        await asyncio.shield(self._sandbox.ended)


def _fields(path: str, **more: object) -> JsonObject:
    return files.fields_of(path, USER, privileges=PRIVILEGES, **more)


async def _feed(command: RunningCommand, data: bytes) -> None:
    """A command that does not read all of it has its own reasons, and its exit code says them."""
    try:
        await command.write_stdin(0, _once(data), eof=True)
    except ClocheError as refused:
        if refused.code not in ("command_ended", "stdin_closed", "sandbox_ended", "transfer_aborted"):
            raise


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _code(end: End) -> int:
    """128 + n for signal n. TimeoutError; or the error by its name when nothing ran."""
    if end.reason is EndReason.EXITED and end.exit_code is not None:
        return end.exit_code
    if end.reason is EndReason.SIGNALLED and end.signal is not None:
        return 128 + end.signal
    if end.reason is EndReason.TIMED_OUT:
        raise TimeoutError
    if end.reason is EndReason.NOT_STARTED:
        raise error(end.error_code or "build_failed", f"It could not be started: {escaped(end.detail or '')}")
    detail = f" ({escaped(end.detail)})" if end.detail else ""
    raise error("build_failed", f"The step was ended: {end.reason.value}{detail}.", detail={"reason": end.reason.value})


def _check(result: TreeResult, path: str) -> None:
    if result.errors or result.errors_more:
        first = result.errors[0] if result.errors else None
        text = f"{escaped(first.path)}: {escaped(first.message)}" if first else "some of its files failed"
        raise error(first.code if first else "guest_io", f"{escaped(path)}: {text}.")
