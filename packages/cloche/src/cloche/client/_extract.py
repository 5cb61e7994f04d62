"""Writes a guest's tree below one directory, and nowhere else.

Every entry is reached from the directory's descriptor, part by part, each opened without following a link; nothing is ever
opened by a path that the guest chose. Files are written under a name of ours and moved into place. What may not be made is an
error of that file, and the rest goes on:

    absolute names, `..`, NUL            refused
    links on the way to an entry         refused, also those the same archive made
    symbolic links                       made only when relative, with `..` only in front, and staying inside
    hard links                           only to a file that this extraction wrote
    devices, pipes, sockets, sparse      refused
    set-user-id, set-group-id, sticky    dropped, and the umask applied; owners are the caller's

A disk that is full, an archive that is cut off or without sense, and the limits end it with an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from pydantic import ValidationError

from cloche.client._placing import (
    NAME_MAX,
    OpenFile,
    Refused,
    current_umask,
    here_failed,
    move_into_place,
    parts_of,
    set_time,
    stays_inside,
    temporary_name,
)
from cloche.client._results import escaped
from cloche.client._tar import Member, TarReader, broken
from cloche.wire.defaults import GIB
from cloche.wire.errors import error
from cloche.wire.files import FileError, TreeResult

RESULT_NAME: Final = ".cloche-result.json"
RESULT_BYTES_MAX: Final = 4 * 1024 * 1024
ENTRIES_MAX: Final = 1_000_000
BYTES_MAX: Final = 64 * GIB
ERRORS_MAX: Final = 1000

_FATAL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE)
_CODES: Final = {
    errno.EEXIST: ("path_exists", "something else is there"),
    errno.ELOOP: ("path_loop", "a link stands in its way"),
    errno.ENOTDIR: ("not_a_directory", "something that is no directory stands in its way"),
    errno.EISDIR: ("is_a_directory", "a directory is there"),
    errno.ENOTEMPTY: ("is_a_directory", "a directory is there"),
    errno.EACCES: ("permission_denied", "not permitted here"),
    errno.EPERM: ("permission_denied", "not permitted here"),
    errno.ENAMETOOLONG: ("name_too_long", "the name is too long"),
}
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Extractor:
    """Takes the stream in pieces: `feed`, then `finish`. A context manager: what is half written goes when it is left."""

    def __init__(
        self,
        directory: Path | str,
        *,
        overwrite: bool = True,
        bytes_max: int = BYTES_MAX,
        entries_max: int = ENTRIES_MAX,
    ) -> None:
        self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._reader = TarReader(self)
        self._overwrite = overwrite
        self._bytes_left = bytes_max
        self._entries_left = entries_max
        self._umask = current_umask()
        self._parent: tuple[tuple[str, ...], int] | None = None
        self._written: dict[tuple[str, ...], tuple[int, int]] = {}
        self._directories: list[tuple[tuple[str, ...], Member]] = []
        self._open: OpenFile | None = None
        self._held: tuple[Member, bytearray] | None = None
        self._is_held = False
        self.files = 0
        self.bytes = 0
        self.errors: list[FileError] = []
        self.errors_more = 0

    def feed(self, data: bytes) -> None:
        self._reader.feed(data)

    def finish(self) -> TreeResult:
        """What was written, and every file that was not: here, and (by the archive's last entry) inside."""
        self._reader.finish()
        if self._held is None:
            raise broken("its last entry, the result, is missing")
        inside = _result(bytes(self._held[1]))
        self._finish_directories()
        for one in inside.errors[:ERRORS_MAX]:
            self._note(FileError(path=escaped(one.path), code=one.code, message=escaped(one.message)))
        return TreeResult(files=self.files, errors=self.errors, errors_more=self.errors_more + inside.errors_more)

    def close(self) -> None:
        if self._open is not None:
            self._open.discard()
            self._open = None
        self._leave_parent()
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def __enter__(self) -> Extractor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # what the reader tells

    def begin(self, member: Member) -> None:
        self._entries_left -= 1
        if self._entries_left < 0:
            raise error("too_large", "The tree has more entries than allowed.")
        if self._held is not None:  # it was not the last one after all, but a file of that name
            held, content = self._held
            self._held = None
            self._make(held)
            self.data(memoryview(bytes(content)))
            self.end()
        if member.kind == "file" and member.name == RESULT_NAME and member.size <= RESULT_BYTES_MAX:
            self._held, self._is_held = (member, bytearray()), True
        else:
            self._make(member)

    def data(self, part: memoryview) -> None:
        self._bytes_left -= len(part)
        if self._bytes_left < 0:
            raise error("too_large", "The tree has more bytes than allowed.")
        if self._is_held and self._held is not None:
            self._held[1].extend(part)
        elif self._open is not None:
            self._open.write(part)
            self.bytes += len(part)

    def end(self) -> None:
        self._is_held = False
        done, self._open = self._open, None
        if done is None:
            return
        try:
            self._written[done.parts] = done.place(self._umask, self._overwrite)
            self.files += 1
        except OSError as raised:
            done.discard()
            self._failed(done.member, raised)

    # one entry

    def _make(self, member: Member) -> None:
        try:
            parts = parts_of(member.name)
            if not parts:
                if member.kind != "dir":
                    raise Refused("invalid_path", "it has no name")
            elif member.kind == "file":
                self._open = OpenFile(member, parts, self._enter(parts[:-1]))
            elif member.kind == "dir":
                self._directory(member, parts)
            elif member.kind == "symlink":
                self._symlink(member, parts)
            elif member.kind == "hardlink":
                self._hardlink(member, parts)
            else:
                raise Refused("unsupported", "it is neither file, directory nor link")
        except Refused as refused:
            self._note(FileError(path=escaped(member.name[:NAME_MAX]), code=refused.code, message=refused.message))
        except OSError as raised:
            self._failed(member, raised)

    def _directory(self, member: Member, parts: tuple[str, ...]) -> None:
        self._enter(parts)
        self._directories.append((parts, member))

    def _symlink(self, member: Member, parts: tuple[str, ...]) -> None:
        if not stays_inside(member.target, len(parts) - 1):
            raise Refused("invalid_path", f"it links to {escaped(member.target[:200])}, which may be outside")
        self._replace(parts, lambda name, parent: os.symlink(member.target, name, dir_fd=parent))
        self.files += 1

    def _hardlink(self, member: Member, parts: tuple[str, ...]) -> None:
        source = parts_of(member.target)
        known = self._written.get(source)
        if known is None or source == parts:
            raise Refused(
                "invalid_path", f"it is a hard link to {escaped(member.target[:200])}, which is no file of this tree"
            )
        from_parent = os.dup(self._enter(source[:-1]))
        try:
            found = os.stat(source[-1], dir_fd=from_parent, follow_symlinks=False)
            if (found.st_dev, found.st_ino) != known or not stat.S_ISREG(found.st_mode):
                raise Refused("invalid_path", "the file that it links to was replaced")
            self._replace(
                parts,
                lambda name, parent: os.link(
                    source[-1], name, src_dir_fd=from_parent, dst_dir_fd=parent, follow_symlinks=False
                ),
            )
        finally:
            os.close(from_parent)
        self._written[parts] = known
        self.files += 1

    def _replace(self, parts: tuple[str, ...], make: Callable[[str, int], None]) -> None:
        """Made under a name of ours, then moved into place: an old file goes at the same moment, a directory stays."""
        parent = self._enter(parts[:-1])
        temporary = temporary_name()
        make(temporary, parent)
        try:
            move_into_place(temporary, parts[-1], parent, self._overwrite)
        except OSError:
            os.unlink(temporary, dir_fd=parent)
            raise
        self._written.pop(parts, None)
        with contextlib.suppress(FileNotFoundError):  # two names of one file: rename leaves both
            os.unlink(temporary, dir_fd=parent)

    def _enter(self, parts: tuple[str, ...]) -> int:
        """The directory's descriptor; made where it is missing. Belongs to us until the next call."""
        if self._parent is not None and self._parent[0] == parts:
            return self._parent[1]
        self._leave_parent()
        current = os.dup(self._root)
        try:
            for part in parts:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=current)
                deeper = os.open(part, _DIRECTORY, dir_fd=current)
                os.close(current)
                current = deeper
        except OSError:
            os.close(current)
            raise
        self._parent = (parts, current)
        return current

    def _leave_parent(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    def _finish_directories(self) -> None:
        """Modes and times last: a directory may be read-only, and filling it changes its time."""
        for parts, member in reversed(self._directories):
            try:
                descriptor = self._enter(parts)
                os.fchmod(descriptor, (member.mode & 0o777 & ~self._umask) | 0o700)
                set_time(descriptor, member)
            except OSError as raised:
                self._failed(member, raised)

    def _failed(self, member: Member, raised: OSError) -> None:
        if raised.errno in _FATAL:
            raise here_failed(raised) from raised
        code, message = _CODES.get(raised.errno or 0, ("guest_io", os.strerror(raised.errno or 0)))
        self._note(FileError(path=escaped(member.name[:NAME_MAX]), code=code, message=message))

    def _note(self, one: FileError) -> None:
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(one)
        else:
            self.errors_more += 1


def _result(content: bytes) -> TreeResult:
    import json

    try:
        return TreeResult.model_validate(json.loads(content))
    except (ValidationError, ValueError, RecursionError):
        raise broken("its result can't be read") from None
