"""A local tree as a tar stream, block by block: what `upload` and `cp` send.

Links are sent as links and never followed; devices, pipes and sockets are left out, with an error each. A file that grows or shrinks
while it is read is sent with the size it had, padded or cut, and named in the errors.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from cloche.client._results import escaped
from cloche.wire.errors import error
from cloche.wire.files import FileError

READ_BYTES: Final = 256 * 1024
BLOCK: Final = 512
ERRORS_MAX: Final = 1000
DEPTH_MAX: Final = 128


class Packer:
    """Iterate `blocks()` once; afterwards `files`, `bytes` and `errors` say what was sent."""

    def __init__(
        self, source: Path | str, *, name: str | None = None, skips: Callable[[str, bool], bool] | None = None
    ) -> None:
        """`source` a directory: its content, with names relative to it. A file: one entry, called `name` or as it is.

        `skips(name, is_directory)` leaves an entry out, a directory with all that is below it.
        """
        self._source = Path(source)
        self._name = name
        self._skips = skips
        self.files = 0
        self.bytes = 0
        self.errors: list[FileError] = []
        self.errors_more = 0

    def blocks(self) -> Iterator[bytes]:
        try:
            status = self._source.stat()
        except OSError as raised:
            raise error(
                "path_not_found",
                f"{escaped(str(self._source))} can't be read: {raised.strerror}.",
                fix="Name a file or directory of yours.",
            ) from None
        if stat.S_ISDIR(status.st_mode):
            root = os.open(self._source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                yield from self._directory(root, "", 0)
            finally:
                os.close(root)
        else:
            yield from self._file(None, str(self._source), self._name or self._source.name, os.O_CLOEXEC)
        yield bytes(2 * BLOCK)

    def _directory(self, descriptor: int, prefix: str, depth: int) -> Iterator[bytes]:
        if depth > DEPTH_MAX:
            self._failed(prefix, "name_too_long", "it is too deep")
            return
        for name in sorted(os.listdir(descriptor)):
            inner = f"{prefix}{name}"
            try:
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if self._skips is not None and self._skips(inner, stat.S_ISDIR(status.st_mode)):
                    continue
                yield from self._entry(descriptor, name, inner, status, depth)
            except OSError as raised:
                self._failed(
                    inner,
                    "permission_denied" if isinstance(raised, PermissionError) else "guest_io",
                    raised.strerror or "it can't be read",
                )

    def _entry(self, parent: int, name: str, inner: str, status: os.stat_result, depth: int) -> Iterator[bytes]:
        if stat.S_ISDIR(status.st_mode):
            deeper = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            try:
                yield _header(inner, status, tarfile.DIRTYPE)
                self.files += 1
                yield from self._directory(deeper, f"{inner}/", depth + 1)
            finally:
                os.close(deeper)
        elif stat.S_ISLNK(status.st_mode):
            yield _header(inner, status, tarfile.SYMTYPE, os.readlink(name, dir_fd=parent))
            self.files += 1
        elif stat.S_ISREG(status.st_mode):
            yield from self._file(parent, name, inner, os.O_NOFOLLOW | os.O_CLOEXEC)
        else:
            self._failed(inner, "unsupported", "it is neither file, directory nor link")

    def _file(self, parent: int | None, name: str, inner: str, flags: int) -> Iterator[bytes]:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=parent)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                self._failed(inner, "unsupported", "it is no file any more")
                return
            yield _header(inner, status, tarfile.REGTYPE)
            yield from self._content(descriptor, inner, status.st_size)
            self.files += 1
        finally:
            os.close(descriptor)

    def _content(self, descriptor: int, inner: str, size: int) -> Iterator[bytes]:
        left = size
        while left:
            try:
                part = os.read(descriptor, min(left, READ_BYTES))
            except OSError:
                part = b""
            if not part:
                self._failed(inner, "transfer_aborted", "it became shorter while it was read")
                part = bytes(min(left, READ_BYTES))
            left -= len(part)
            self.bytes += len(part)
            yield part
        if size % BLOCK:
            yield bytes(-size % BLOCK)

    def _failed(self, path: str, code: str, message: str) -> None:
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(FileError(path=escaped(path), code=code, message=message))
        else:
            self.errors_more += 1


def _header(name: str, status: os.stat_result, kind: bytes, target: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    info.size = status.st_size if kind == tarfile.REGTYPE else 0
    info.mode = stat.S_IMODE(status.st_mode)
    info.mtime = int(status.st_mtime)
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
