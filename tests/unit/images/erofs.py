"""Reads an EROFS file as Linux does, as much of it as our roots have: no compression, one device.

Independent of mkfs.erofs and of any mount, so that a test needs no privilege to see what a root holds.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0xE0F5E1E2
SUPERBLOCK_AT = 1024
NID_BYTES = 32
DIRENT_BYTES = 12
PLAIN, INLINE = 0, 2


@dataclass(frozen=True)
class Inode:
    """What stat(2) would say, and where the bytes are."""

    number: int
    mode: int
    uid: int
    gid: int
    size: int
    seconds: int
    nanos: int
    links: int
    xattrs: int
    place: int
    layout: int
    header_bytes: int
    at: int

    @property
    def kind(self) -> str:
        kinds = {
            stat.S_IFREG: "file",
            stat.S_IFDIR: "dir",
            stat.S_IFLNK: "symlink",
            stat.S_IFCHR: "char",
            stat.S_IFBLK: "block",
            stat.S_IFIFO: "fifo",
        }
        return kinds[stat.S_IFMT(self.mode)]

    @property
    def device(self) -> tuple[int, int]:
        return (self.place >> 8) & 0xFFF, (self.place & 0xFF) | ((self.place >> 12) & 0xFFF00)


class Erofs:
    """One image in memory."""

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        magic, _, _, block_bits = struct.unpack_from("<IIIB", self._data, SUPERBLOCK_AT)
        assert magic == MAGIC, "not EROFS"
        (root,) = struct.unpack_from("<H", self._data, SUPERBLOCK_AT + 14)
        (self._build_time,) = struct.unpack_from("<Q", self._data, SUPERBLOCK_AT + 24)
        (self._meta_block,) = struct.unpack_from("<I", self._data, SUPERBLOCK_AT + 40)
        self._block_bytes = 1 << block_bits
        self.root = self._inode(root)

    def _inode(self, nid: int) -> Inode:
        at = self._meta_block * self._block_bytes + nid * NID_BYTES
        form, xattrs, mode = struct.unpack_from("<HHH", self._data, at)
        layout = (form >> 1) & 7
        assert layout in (PLAIN, INLINE), f"layout {layout}"
        if form & 1:
            size, place, _, uid, gid, seconds, nanos, links = struct.unpack_from("<QIIIIqII", self._data, at + 8)
            header = 64
        else:
            links, size, _, place, _, uid, gid = struct.unpack_from("<HIIIIHH", self._data, at + 6)
            seconds, nanos, header = self._build_time, 0, 32
        if xattrs:
            header += 12 + 4 * (xattrs - 1)
        return Inode(nid, mode, uid, gid, size, seconds, nanos, links, xattrs, place, layout, header, at)

    def content(self, inode: Inode) -> bytes:
        if inode.layout == PLAIN:
            start = inode.place * self._block_bytes
            data = self._data[start : start + inode.size]
        else:
            whole = inode.size // self._block_bytes * self._block_bytes
            start, tail = inode.place * self._block_bytes, inode.at + inode.header_bytes
            data = self._data[start : start + whole] + self._data[tail : tail + inode.size - whole]
        assert len(data) == inode.size, "content ends beyond the image"
        return data

    def children(self, inode: Inode) -> Iterator[tuple[bytes, Inode]]:
        data = self.content(inode)
        for start in range(0, len(data), self._block_bytes):
            block = data[start : start + self._block_bytes]
            (first,) = struct.unpack_from("<H", block, 8)
            entries = [struct.unpack_from("<QHB", block, at) for at in range(0, first, DIRENT_BYTES)]
            ends = [name_at for _, name_at, _ in entries[1:]] + [len(block)]
            for (nid, name_at, _), end in zip(entries, ends, strict=True):
                name = block[name_at:end].split(b"\0")[0]
                if name not in (b".", b".."):
                    yield name, self._inode(nid)

    def walk(self) -> Iterator[tuple[bytes, Inode]]:
        """Every path with its inode; the root is the empty path. A name twice in a directory is an error."""
        todo = [(b"", self.root)]
        while todo:
            path, inode = todo.pop()
            yield path, inode
            if inode.kind == "dir":
                names = set()
                for name, child in self.children(inode):
                    assert name not in names, f"{name!r} twice in {path!r}"
                    names.add(name)
                    todo.append((path + b"/" + name if path else name, child))

    def tree(self) -> dict[bytes, Inode]:
        return dict(self.walk())


def told(image: Erofs, inode: Inode) -> str:
    """One inode in one word, for tables: `dir`, `file:content`, `symlink:target`, `char:1:3`."""
    if inode.kind == "file":
        return "file:" + image.content(inode)[:64].decode(errors="replace")
    if inode.kind == "symlink":
        return "symlink:" + image.content(inode).decode(errors="replace")
    if inode.kind in ("char", "block"):
        return f"{inode.kind}:{inode.device[0]}:{inode.device[1]}"
    return inode.kind
