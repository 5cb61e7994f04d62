"""Files, trees, watches and ports of a guest, over its channel. Every buffer is one window or has its own limit here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from typing import Any, Final

import msgspec
from pydantic import ValidationError

from cloche.wire.errors import GUEST_CODES, ClocheError, error
from cloche.wire.files import Entry, EntryList, FileError, TreeResult, WatchEvent
from cloche_server.channel import (
    ByteReader,
    ByteWriter,
    Channel,
    ChannelFull,
    ChannelLost,
    JsonObject,
    OperationFailed,
    ProtocolError,
    Stream,
    StreamEnded,
    unwrap,
)
from cloche_server.node.context import from_channel, from_guest
from cloche_server.node.guest_text import escaped
from cloche_server.node.tar_tail import TarBroken, TarTail, result_entry
from cloche_server.node.users import check_user

ENTRIES_MAX: Final = 100_000
LINE_BYTES_MAX: Final = 64 * 1024
TREE_ERRORS_MAX: Final = 1000
CONNECT_S: Final = 15.0


@contextmanager
def told_as_ours(doing: str) -> Iterator[None]:
    """No exception of the channel reaches a caller."""
    try:
        yield
    except OperationFailed as failure:
        raise from_guest(failure, GUEST_CODES, doing=doing) from failure
    except (ChannelLost, ChannelFull, ProtocolError) as failure:
        raise from_channel(failure) from failure
    except StreamEnded as failure:
        raise error("transfer_aborted", f"{doing}: the guest ended it.") from failure


def fields_of(path: str, user: str | None, **more: object) -> JsonObject:
    if "\0" in path or not path:
        raise error("invalid_path", "A path is not empty and has no NUL.")
    check_user(user)
    fields: JsonObject = {"path": path, **{name: value for name, value in more.items() if value is not None}}
    if user is not None:
        fields["user"] = user
    return fields


async def ask(channel: Channel, op: str, fields: JsonObject, *, data: AsyncIterator[bytes] | None = None) -> JsonObject:
    """One operation without bytes in its answer."""
    with told_as_ours(op):
        ok, _ = await channel.call(op, fields, data=data)
        return ok


async def read_bytes(
    channel: Channel, op: str, fields: JsonObject, *, result: list[JsonObject] | None = None
) -> AsyncIterator[bytes]:
    """What an operation sends. Leaving early tells the guest to stop; `result` gets its END."""
    with told_as_ours(op):
        reader = ByteReader()
        stream = channel.open(op, fields, sink=reader)
        reader.attach(stream)
        over = False
        try:
            async for piece in reader:
                yield piece
            ok = unwrap(await stream.result)
            over = True
            if result is not None:
                result.append(ok)
        finally:
            if over or stream.result.done():
                stream.confirm()
            else:
                stream.discard("the reader left")


def count(ok: JsonObject, name: str) -> int:
    value = ok.get(name)
    if type(value) is not int or value < 0:
        raise _nonsense(name)
    return value


async def stat(channel: Channel, path: str, *, follow: bool, user: str | None) -> Entry:
    ok = await ask(channel, "fs.stat", fields_of(path, user, follow=follow))
    return _entry(ok.get("entry"))


async def list_files(channel: Channel, path: str, *, depth: int, user: str | None) -> EntryList:
    entries: list[Entry] = []
    lines = json_lines(read_bytes(channel, "fs.list", fields_of(path, user, depth=depth)))
    async for line in lines:
        if len(entries) == ENTRIES_MAX:
            await lines.aclose()
            return EntryList(entries=entries, truncated=True)
        entries.append(_entry(line))
    return EntryList(entries=entries)


async def watch(channel: Channel, path: str, *, recursive: bool, user: str | None) -> AsyncIterator[WatchEvent]:
    async for line in json_lines(read_bytes(channel, "fs.watch", fields_of(path, user, recursive=recursive))):
        if isinstance(line, dict) and "from" in line:
            line["source"] = line.pop("from")
        try:
            event = WatchEvent.model_validate(line)
        except ValidationError as bad:
            raise _nonsense("fs.watch") from bad
        yield event


async def read_tree(channel: Channel, path: str, *, user: str | None) -> AsyncIterator[bytes]:
    """The guest's tar, and as its last entry what could not be read."""
    tail, result = TarTail(), list[JsonObject]()
    try:
        async for piece in read_bytes(channel, "tree.read", fields_of(path, user), result=result):
            if passed := tail.feed(piece):
                yield passed
    except TarBroken as bad:
        raise _nonsense("tree.read") from bad
    if not tail.is_whole:
        raise _nonsense("tree.read")
    # Not model_dump_json: a name that is not UTF-8 holds lone surrogates, which only escapes can carry.
    yield result_entry(json.dumps(tree_result(result[0]).model_dump()).encode())


async def write_tree(
    channel: Channel, path: str, data: AsyncIterator[bytes], *, overwrite: bool, user: str | None
) -> TreeResult:
    ok = await ask(channel, "tree.write", fields_of(path, user, overwrite=overwrite), data=data)
    return tree_result(ok)


def tree_result(ok: JsonObject) -> TreeResult:
    errors = ok.get("errors", [])
    if not isinstance(errors, list):
        raise _nonsense("tree")
    try:
        kept = [
            FileError.model_validate({**each, "code": GUEST_CODES.get(each["code"], "guest_io")})
            for each in errors[:TREE_ERRORS_MAX]
        ]
        more = int(str(ok.get("errors_more", 0))) + max(0, len(errors) - TREE_ERRORS_MAX)
        return TreeResult(files=int(str(ok.get("files", 0))), errors=kept, errors_more=more)
    except (ValidationError, ValueError, TypeError, KeyError) as bad:
        raise _nonsense("tree") from bad


async def json_lines(pieces: AsyncIterator[bytes]) -> Any:
    """One object a line; a line that has no end within its limit is a guest's nonsense."""
    kept = bytearray()
    try:
        async for piece in pieces:
            kept += piece
            *lines, rest = bytes(kept).split(b"\n")
            kept = bytearray(rest)
            if len(kept) > LINE_BYTES_MAX:
                raise _nonsense("a line")
            for line in lines:
                yield _decoded(line)
    finally:
        closing = getattr(pieces, "aclose", None)
        if closing is not None:
            await closing()


def _decoded(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except msgspec.DecodeError:
        pass
    try:
        return _lenient(line)
    except ValueError as bad:
        raise _nonsense("a line") from bad


def _lenient(line: bytes) -> Any:
    """Names that are not UTF-8 come with lone surrogates, which only the standard library's reader takes."""
    return json.loads(line)


def _entry(value: object) -> Entry:
    try:
        return Entry.model_validate(value)
    except ValidationError as bad:
        raise _nonsense("an entry") from bad


def _nonsense(what: str) -> ClocheError:
    return error("guest_io", f"The guest's answer ({escaped(what)}) cannot be understood.")


class Port:
    """A connection to a port inside: `api.backend.Duplex`. The sandbox is in use until it is closed."""

    def __init__(self, stream: Stream, reader: ByteReader, call: AsyncExitStack) -> None:
        self._stream = stream
        self._reader = reader
        self._writer = ByteWriter(stream)
        self._call = call

    @classmethod
    async def connect(cls, call: AbstractAsyncContextManager[Channel], port: int) -> Port:
        with told_as_ours(f"port {port}"):
            async with AsyncExitStack() as undo:
                channel = await undo.enter_async_context(call)
                reader = ByteReader()
                stream = channel.open("port.connect", {"port": port}, sink=reader)
                reader.attach(stream)
                undo.callback(stream.discard, "closed")
                try:
                    async with asyncio.timeout(CONNECT_S):
                        await stream.opened()
                except TimeoutError as late:
                    raise error(
                        "connection_refused", f"Nothing answered on port {port} within {CONNECT_S:g} s."
                    ) from late
                return cls(stream, reader, undo.pop_all())
        raise AssertionError("unreachable")

    async def receive(self) -> bytes:
        with told_as_ours("port"):
            return await anext(self._reader, b"")

    async def send(self, data: bytes) -> None:
        with told_as_ours("port"):
            await self._writer.write(data)

    async def send_eof(self) -> None:
        self._writer.close()

    async def close(self) -> None:
        await self._call.aclose()
