"""Files inside a sandbox: one at a time, or whole trees."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from cloche.client._async.transport import STREAM_SILENCE_S, AsyncTransport, Lost, new_key
from cloche.client._extract import Extractor
from cloche.client._pack import Packer
from cloche.client._requests import bytes_of, read_model, request_body
from cloche.client._stream import EventParser
from cloche.wire.errors import Problem, error, from_problem
from cloche.wire.files import Entry, EntryList, MakeDirectory, Move, Removed, TreeResult, WatchEvent, Written
from cloche.wire.ids import short

BYTES = "application/octet-stream"
TAR = "application/x-tar"


class AsyncFiles:
    """The files of one sandbox. Paths are absolute; `user` acts as another user of the image."""

    def __init__(self, transport: AsyncTransport, sandbox: str) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self._path = f"/v1/sandboxes/{sandbox}/files"
        self._tree = f"/v1/sandboxes/{sandbox}/tree"

    async def read(self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None) -> bytes:
        query = {"path": path, "offset": offset, "length": length, "user": user}
        return (await self._transport.request("GET", self._path, query=query)).body

    async def read_text(self, path: str, *, encoding: str = "utf-8", user: str | None = None) -> str:
        return (await self.read(path, user=user)).decode(encoding)

    async def read_parts(
        self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncIterator[bytes]:
        """Piece by piece, for what should not be in memory at once."""
        query = {"path": path, "offset": offset, "length": length, "user": user}
        try:
            async with self._transport.stream("GET", self._path, query=query) as answer:
                async for part in answer.parts:
                    yield part
        except Lost as lost:
            raise lost.failure from lost.__cause__

    async def write(
        self,
        path: str,
        data: str | bytes | AsyncIterator[bytes],
        *,
        mode: int | None = None,
        parents: bool = True,
        append: bool = False,
        user: str | None = None,
    ) -> int:
        """Writes a file whole: it appears when it is complete. Returns how many bytes."""
        content = bytes_of(data) if isinstance(data, str | bytes) else data
        query = {
            "path": path,
            "mode": None if mode is None else f"{mode:o}",
            "parents": parents,
            "append": append,
            "user": user,
        }
        answer = await self._transport.request(
            "PUT", self._path, query=query, content=content, content_type=BYTES, may_repeat=not append
        )
        return Written.model_validate_json(answer.body).bytes

    async def list(self, path: str, *, depth: int = 1, user: str | None = None) -> builtins.list[Entry]:
        answer = await self._transport.request(
            "GET", f"{self._path}/list", query={"path": path, "depth": depth, "user": user}
        )
        found = read_model(EntryList, answer.body)
        if found.truncated:
            raise error(
                "too_large",
                "The listing is too long for one answer.",
                fix="List with a smaller depth, or a directory below.",
            )
        return found.entries

    async def stat(self, path: str, *, follow: bool = True, user: str | None = None) -> Entry:
        answer = await self._transport.request(
            "GET", f"{self._path}/stat", query={"path": path, "follow": follow, "user": user}
        )
        return read_model(Entry, answer.body)

    async def move(self, source: str, target: str, *, overwrite: bool = False, user: str | None = None) -> None:
        body = request_body(Move, source=source, target=target, overwrite=overwrite, user=user)
        await self._transport.request("POST", f"{self._path}/move", content=body)

    async def remove(self, path: str, *, recursive: bool = False, user: str | None = None) -> int:
        """How many files and directories went."""
        query = {"path": path, "recursive": recursive, "user": user}
        answer = await self._transport.request("DELETE", self._path, query=query, may_repeat=False)
        return Removed.model_validate_json(answer.body).removed

    async def mkdir(self, path: str, *, parents: bool = True, mode: int | None = None, user: str | None = None) -> None:
        body = request_body(MakeDirectory, path=path, parents=parents, mode=mode, user=user)
        await self._transport.request("POST", f"{self._path}/mkdir", content=body, key=new_key() if parents else None)

    async def watch(self, path: str, *, recursive: bool = False, user: str | None = None) -> AsyncIterator[WatchEvent]:
        """Changes as they happen, until you leave the loop. A lost connection raises: what happened meanwhile is unknown."""
        query = {"path": path, "recursive": recursive, "user": user}
        parser = EventParser()
        headers = {"accept": "text/event-stream"}
        try:
            async with self._transport.stream(
                "GET", f"{self._path}/watch", query=query, headers=headers, timeout_s=STREAM_SILENCE_S
            ) as answer:
                async for part in answer.parts:
                    for event in parser.feed(part):
                        if event.name == "error":
                            raise from_problem(Problem.model_validate_json(event.data))
                        yield read_model(WatchEvent, event.data)
        except Lost as lost:
            raise lost.failure from lost.__cause__

    async def upload(
        self, source: Path | str, path: str, *, overwrite: bool = False, user: str | None = None
    ) -> TreeResult:
        """A local directory's content (or one file) into the directory `path`. Each file that failed is in the result."""
        packer = Packer(source)
        query = {"path": path, "overwrite": overwrite, "user": user}
        answer = await self._transport.request(
            "PUT", self._tree, query=query, content=_in_turn(packer.blocks()), content_type=TAR
        )
        result = read_model(TreeResult, answer.body)
        errors = [*packer.errors, *result.errors]
        return TreeResult(files=result.files, errors=errors, errors_more=result.errors_more + packer.errors_more)

    async def download(
        self, path: str, target: Path | str, *, overwrite: bool = True, user: str | None = None
    ) -> TreeResult:
        """The content of the directory `path` into the local directory `target`, made if it is missing; never outside of it.

        Each file that was not read inside, or not written here, is in the result's errors.
        """
        await asyncio.to_thread(_make_directory, target)
        try:
            with Extractor(target, overwrite=overwrite) as extractor:
                async with self._transport.stream("GET", self._tree, query={"path": path, "user": user}) as answer:
                    async for part in answer.parts:
                        await asyncio.to_thread(extractor.feed, part)
                return await asyncio.to_thread(extractor.finish)
        except Lost as lost:
            raise lost.failure from lost.__cause__

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {short(self._sandbox)}>"


async def _in_turn(blocks: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (block := await asyncio.to_thread(next, blocks, None)) is not None:
        yield block


def _make_directory(target: Path | str) -> None:
    try:
        Path(target).mkdir(parents=True, exist_ok=True)
    except OSError as raised:
        raise error("invalid_request", f"{target} can't be a directory: {raised.strerror}.") from None
