"""COPY and ADD: which entries go where, as a tar stream for a room. Pure but for reading the bytes of the source's own file.

The rules are BuildKit's: a directory's content is copied, not the directory; a source's own link is followed, links in a directory are
copied as links; `/` at the end, or a directory that is there, makes the destination a directory; what is copied from the context is
root's, what is copied from a stage or image keeps its owner, and `--chown` is for all, new parents too.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cloche_server.images.build.glob import BadPattern
from cloche_server.images.build.problems import failed, invalid, shown
from cloche_server.images.build.tree import Match, Node, Tree, has_wildcard

CHUNK_BYTES: Final = 1024 * 1024
_TYPES: Final = {
    "file": tarfile.REGTYPE,
    "dir": tarfile.DIRTYPE,
    "symlink": tarfile.SYMTYPE,
    "fifo": tarfile.FIFOTYPE,
}


@dataclass(frozen=True)
class Owner:
    """None: as in the source."""

    uid: int | None
    gid: int | None


@dataclass(frozen=True)
class Chosen:
    """What the sources named, before anybody knows what is at the destination."""

    files: tuple[Match, ...]
    """Files, under their last name."""
    content: tuple[Node, ...]
    """Of directories; paths relative to the directory."""
    has_directory: bool


def choose(tree: Tree, sources: Sequence[str], *, line: int, text: str, hidden: Tree | None = None) -> Chosen:
    """`hidden`: the same tree without its ignore file, for the message."""
    files: list[Match] = []
    content: list[Node] = []
    has_directory = False
    for source in sources:
        try:
            found = tree.match(source)
        except BadPattern as bad:
            raise invalid(line, f"{shown(source, 100)!r} is not a pattern.") from bad
        if not found and not has_wildcard(source):
            why = " (.dockerignore leaves it out)" if hidden is not None and hidden.match(source) else ""
            raise failed(line, text, f"{shown(source, 100)!r} is not there{why}.")
        for match in found:
            if match.node.type != "dir":
                files.append(Match(posixpath.basename(match.name), match.node))
                continue
            has_directory = True
            start = len(match.node.path) + 1 if match.node.path else 0
            content += [replace(each, path=each.path[start:]) for each in tree.below(match.node.path)]
    return Chosen(tuple(files), tuple(content), has_directory)


@dataclass(frozen=True)
class Placed:
    """A tar for `Room.put_tree(base, ...)`. `nodes` have their names in it, parents first."""

    base: str
    nodes: tuple[Node, ...]


def place(
    chosen: Chosen, dest: str, *, dest_is_directory: bool, existing: str, owner: Owner, mode: int | None, now: float
) -> Placed:
    """`existing`: the deepest directory that is there, of the directory that everything goes into."""
    target = target_directory(chosen, dest, dest_is_directory=dest_is_directory)
    missing = [part for part in posixpath.relpath(target, existing).split("/") if part not in ("", ".")]
    nodes: dict[str, Node] = {}
    path = ""
    for part in missing:
        path = f"{path}/{part}" if path else part
        nodes[path] = Node(path, "dir", 0o755, owner.uid or 0, owner.gid or 0, now)
    prefix = f"{path}/" if path else ""
    into = target == dest.rstrip("/") or dest == "/" or chosen.has_directory
    for match in chosen.files:
        name = match.name if into else posixpath.basename(dest)
        nodes[prefix + name] = _owned(replace(match.node, path=prefix + name), owner, mode)
    for each in chosen.content:
        nodes[prefix + each.path] = _owned(replace(each, path=prefix + each.path), owner, mode)
    return Placed(existing, tuple(nodes.values()))


def target_directory(chosen: Chosen, dest: str, *, dest_is_directory: bool) -> str:
    """Where the names go: the destination, or what it is in."""
    if dest_is_directory or dest.endswith("/") or chosen.has_directory:
        return dest.rstrip("/") or "/"
    return posixpath.dirname(dest)


def _owned(node: Node, owner: Owner, mode: int | None) -> Node:
    return replace(
        node,
        uid=node.uid if owner.uid is None else owner.uid,
        gid=node.gid if owner.gid is None else owner.gid,
        mode=node.mode if mode is None or node.type == "symlink" else mode,
    )


def parents(path: str) -> Iterator[str]:
    """The path itself, then what it is in, up to `/`."""
    while True:
        yield path
        if path == "/":
            return
        path = posixpath.dirname(path)


async def tar_of(nodes: Sequence[Node]) -> AsyncIterator[bytes]:
    """The same nodes give the same bytes."""
    for node in nodes:
        yield _header(node)
        if node.type != "file":
            continue
        if node.data is not None:
            yield node.data
        else:
            async for piece in _content(node):
                yield piece
        yield bytes(-node.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(node: Node) -> bytes:
    info = tarfile.TarInfo(node.path)
    info.type = _TYPES[node.type]
    info.mode = stat.S_IMODE(node.mode)
    info.uid, info.gid = node.uid, node.gid
    info.mtime = int(node.mtime)
    info.size = node.size if node.type == "file" else 0
    info.linkname = (node.link or "") if node.type == "symlink" else ""
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


async def _content(node: Node) -> AsyncIterator[bytes]:
    at = 0
    while at < node.size:
        piece = await asyncio.to_thread(os.pread, node.fd, min(CHUNK_BYTES, node.size - at), node.offset + at)
        if not piece:
            raise AssertionError("the archive is shorter than its index")
        at += len(piece)
        yield piece
