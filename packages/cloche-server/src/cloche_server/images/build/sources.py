"""Where COPY and ADD read from: the context, a room of another stage or image, an archive in the context.

Bytes that come from a room or from an archive go into unlinked files of the store's disk, with a limit, and are indexed by the converter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from cloche.wire.errors import ClocheError
from cloche_server.images.build import apart
from cloche_server.images.build.copying import Chosen
from cloche_server.images.build.glob import BadPattern
from cloche_server.images.build.problems import failed, invalid, shown, unsupported
from cloche_server.images.build.protocols import Converter, Room, Shelf
from cloche_server.images.build.steps import Step
from cloche_server.images.build.tree import Match, Node, Tree, has_wildcard

HEAD_BYTES: Final = 512
_COMPRESSED: Final = (apart.GZIP, apart.BZIP2, apart.XZ)


class Sources:
    """Keeps the files that it made open until the build ends."""

    def __init__(self, shelf: Shelf, converter: Converter, bytes_max: int) -> None:
        self._shelf = shelf
        self._converter = converter
        self._bytes_max = bytes_max
        self._fds: list[int] = []

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _temporary(self) -> int:
        fd = self._shelf.temporary()
        self._fds.append(fd)
        return fd

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[int]:
        fd = self._shelf.temporary()
        try:
            yield fd
        finally:
            os.close(fd)

    async def index(self, fd: int, *, is_context: bool = False) -> Tree:
        with self._scratch() as output:
            entries = await self._converter.index(fd, output)
        return await asyncio.to_thread(Tree.of, entries, fd, is_context=is_context)

    async def from_room(self, room: Room, sources: Sequence[str], step: Step) -> Chosen:
        files: list[Match] = []
        content: list[Node] = []
        has_directory = False
        for source in sources:
            clean = "/" + posixpath.normpath("/" + source).lstrip("/")
            for path in await self._paths(room, clean, step):
                found = await room.stat(path)
                if found is None:
                    raise failed(step.line, step.text, f"{shown(source, 100)!r} is not there.")
                tree = await self._fetched(room, path, step)
                if found.kind == "dir":
                    has_directory = True
                    content += tree.below("")
                elif names := tree.names(""):
                    node = tree.resolve(names[0])
                    if node is not None:
                        files.append(Match(posixpath.basename(path), node))
        return Chosen(tuple(files), tuple(content), has_directory)

    async def _paths(self, room: Room, source: str, step: Step) -> list[str]:
        """A pattern becomes the names that match it; anything else is itself."""
        if not has_wildcard(source):
            return [source]
        parts = source.split("/")
        plain = next(index for index, part in enumerate(parts) if has_wildcard(part))
        top = "/".join(parts[:plain]) or "/"
        found = await room.stat(top)
        if found is None or found.kind != "dir":
            return []
        tree = await self._fetched(room, top, step)
        try:
            matches = tree.match("/".join(parts[plain:]), follow=False)
        except BadPattern as bad:
            raise invalid(step.line, f"{shown(source, 100)!r} is not a pattern.") from bad
        return [posixpath.join(top, match.name) for match in matches]

    async def _fetched(self, room: Room, path: str, step: Step) -> Tree:
        fd = self._temporary()
        written = 0
        async for piece in room.get_tree(path):
            written += len(piece)
            if written > self._bytes_max:
                raise failed(step.line, step.text, f"{shown(path, 100)!r} is larger than {self._bytes_max} bytes.")
            await asyncio.to_thread(_write_all, fd, piece)
        return await self.index(fd)

    async def unpacked(self, chosen: Chosen, step: Step) -> Chosen:
        """ADD: a local tar, compressed or not, becomes its content, with its own owners."""
        files: list[Match] = []
        content = list(chosen.content)
        has_directory = chosen.has_directory
        for match in chosen.files:
            tree = await self._archive(match.node, step)
            if tree is None:
                files.append(match)
                continue
            has_directory = True
            content += tree.below("")
        return Chosen(tuple(files), tuple(content), has_directory)

    async def _archive(self, node: Node, step: Step) -> Tree | None:
        if node.data is not None or node.size < HEAD_BYTES // 8:
            return None
        head = await asyncio.to_thread(os.pread, node.fd, min(HEAD_BYTES, node.size), node.offset)
        if head.startswith(apart.ZSTD):
            raise unsupported(step.line, "ADD of a zstd archive", "unpack it in a RUN, or use gzip.")
        if not head.startswith(_COMPRESSED) and not is_tar(head):
            return None
        fd = self._temporary()
        try:
            await apart.decompress(node.fd, node.offset, node.size, fd, self._bytes_max)
        except (apart.NotUnpacked, apart.ParserDied) as bad:
            raise failed(step.line, step.text, f"the archive cannot be unpacked: {bad}.") from bad
        if not is_tar(await asyncio.to_thread(os.pread, fd, HEAD_BYTES, 0)):
            return None
        try:
            return await self.index(fd)
        except ClocheError as bad:
            raise failed(step.line, step.text, f"the archive is refused: {bad.message}", reason=bad.code) from bad


def is_tar(head: bytes) -> bool:
    """By the checksum of its first header, which old archives have too."""
    if len(head) < HEAD_BYTES or not head.strip(b"\0"):
        return False
    told = head[148:156].strip(b" \0")
    if not told or not all(char in b"01234567" for char in told):
        return False
    return int(told, 8) == sum(head[:148]) + 8 * ord(" ") + sum(head[156:])


async def read_node(node: Node | None, bytes_max: int) -> bytes | None:
    """A small file of a tree. None: not there, or no file, or longer."""
    if node is None or node.type != "file" or node.size > bytes_max:
        return None
    return await asyncio.to_thread(os.pread, node.fd, node.size, node.offset)


def inline(contents: Sequence[tuple[str, str]], now: float) -> tuple[Match, ...]:
    """Heredocs: root's, 0644."""
    made = []
    for name, text in contents:
        data = text.encode("utf-8", "surrogateescape")
        made.append(Match(name, Node(name, "file", 0o644, 0, 0, now, len(data), data=data)))
    return tuple(made)


def with_files(chosen: Chosen, files: Sequence[Match]) -> Chosen:
    return replace(chosen, files=(*chosen.files, *files))


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
