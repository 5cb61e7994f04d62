"""Files, trees and ports of a sandbox, as a Backend answers for them: found, marked as in use, and asked over its channel."""

from __future__ import annotations

from collections.abc import AsyncIterator

from cloche.wire.files import Entry, EntryList, MakeDirectory, Move, TreeResult, WatchEvent
from cloche_server.api.backend import Caller, Duplex
from cloche_server.node import files
from cloche_server.node.sandbox import Sandbox


class Filing:
    """The file half of `api.backend.Backend`."""

    def _live(self, caller: Caller, sandbox: str) -> Sandbox:
        """The node's: raises not_found, ambiguous, sandbox_ended."""
        raise NotImplementedError

    async def read_file(
        self, caller: Caller, sandbox: str, path: str, *, offset: int, length: int | None, user: str | None
    ) -> AsyncIterator[bytes]:
        async with self._live(caller, sandbox).call() as channel:
            fields = files.fields_of(path, user, offset=offset or None, length=length)
            async for piece in files.read_bytes(channel, "file.read", fields):
                yield piece

    async def write_file(
        self,
        caller: Caller,
        sandbox: str,
        path: str,
        data: AsyncIterator[bytes],
        *,
        mode: int | None,
        make_parents: bool,
        append: bool,
        user: str | None,
    ) -> int:
        async with self._live(caller, sandbox).call() as channel:
            fields = files.fields_of(path, user, mode=mode, make_parents=make_parents, append=append)
            return files.count(await files.ask(channel, "file.write", fields, data=data), "bytes")

    async def stat(self, caller: Caller, sandbox: str, path: str, *, follow: bool, user: str | None) -> Entry:
        async with self._live(caller, sandbox).call() as channel:
            return await files.stat(channel, path, follow=follow, user=user)

    async def list_files(self, caller: Caller, sandbox: str, path: str, *, depth: int, user: str | None) -> EntryList:
        async with self._live(caller, sandbox).call() as channel:
            return await files.list_files(channel, path, depth=depth, user=user)

    async def make_directory(self, caller: Caller, sandbox: str, request: MakeDirectory) -> bool:
        async with self._live(caller, sandbox).call() as channel:
            fields = files.fields_of(request.path, request.user, parents=request.parents, mode=request.mode)
            return (await files.ask(channel, "fs.mkdir", fields)).get("created") is True

    async def move(self, caller: Caller, sandbox: str, request: Move) -> None:
        async with self._live(caller, sandbox).call() as channel:
            fields = files.fields_of(request.source, request.user, to=request.target, overwrite=request.overwrite)
            fields["from"] = fields.pop("path")
            await files.ask(channel, "fs.move", fields)

    async def remove(self, caller: Caller, sandbox: str, path: str, *, recursive: bool, user: str | None) -> int:
        async with self._live(caller, sandbox).call() as channel:
            return files.count(
                await files.ask(channel, "fs.remove", files.fields_of(path, user, recursive=recursive)), "removed"
            )

    async def watch(
        self, caller: Caller, sandbox: str, path: str, *, recursive: bool, user: str | None
    ) -> AsyncIterator[WatchEvent]:
        async with self._live(caller, sandbox).call() as channel:
            async for event in files.watch(channel, path, recursive=recursive, user=user):
                yield event

    async def read_tree(self, caller: Caller, sandbox: str, path: str, *, user: str | None) -> AsyncIterator[bytes]:
        async with self._live(caller, sandbox).call() as channel:
            async for piece in files.read_tree(channel, path, user=user):
                yield piece

    async def write_tree(
        self, caller: Caller, sandbox: str, path: str, data: AsyncIterator[bytes], *, overwrite: bool, user: str | None
    ) -> TreeResult:
        async with self._live(caller, sandbox).call() as channel:
            return await files.write_tree(channel, path, data, overwrite=overwrite, user=user)

    async def connect_port(self, caller: Caller, sandbox: str, port: int) -> Duplex:
        return await files.Port.connect(self._live(caller, sandbox).call(), port)
