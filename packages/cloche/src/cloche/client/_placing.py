"""How one file gets to its place below a directory: written beside it under a name of ours, then moved.

Nothing here takes a path: only one name at a time, and the descriptor of the directory that it is in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

from cloche.client._tar import Member
from cloche.wire.errors import ClocheError, error

DEPTH_MAX: Final = 128
NAME_MAX: Final = 4096
TIME_NS_MAX: Final = 2**63 - 1

_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Refused(Exception):
    """This entry is not made; the next may be."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class OpenFile:
    """A file that is being written, under a name of ours, beside its place."""

    def __init__(self, member: Member, parts: tuple[str, ...], parent: int) -> None:
        self.member = member
        self.parts = parts
        self._temporary = temporary_name()
        self._parent = os.dup(parent)
        try:
            self._file = os.open(self._temporary, _NEW_FILE, 0o600, dir_fd=self._parent)
        except OSError:
            os.close(self._parent)
            raise

    def write(self, part: memoryview) -> None:
        try:
            while part:
                part = part[os.write(self._file, part) :]
        except OSError as raised:
            raise here_failed(raised) from raised

    def place(self, umask: int, overwrite: bool) -> tuple[int, int]:
        """Its mode, its time, its name; then what it is, so that a hard link can be checked against it."""
        os.fchmod(self._file, self.member.mode & 0o777 & ~umask)
        set_time(self._file, self.member)
        move_into_place(self._temporary, self.parts[-1], self._parent, overwrite)
        status = os.fstat(self._file)
        os.close(self._file)
        os.close(self._parent)
        self._file = -1
        return status.st_dev, status.st_ino

    def discard(self) -> None:
        if self._file < 0:
            return
        with contextlib.suppress(OSError):
            os.unlink(self._temporary, dir_fd=self._parent)
        os.close(self._file)
        os.close(self._parent)
        self._file = -1


def here_failed(raised: OSError) -> ClocheError:
    code = "no_space" if raised.errno in (errno.ENOSPC, errno.EDQUOT) else "transfer_aborted"
    why = os.strerror(raised.errno or 0)
    return error(code, f"Writing here failed: {why}.", fix="Make room, or choose another directory.")


def stays_inside(target: str, depth: int) -> bool:
    """True when a link `depth` directories below the root can't lead out, whatever else is or will be linked.

    `..` after a name could step out of whatever that name is a link to, so it is only allowed in front, where it steps
    out of directories that are known to be real.
    """
    if not target or target.startswith("/") or "\0" in target or len(target) > NAME_MAX:
        return False
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    return ups <= depth and ".." not in parts[ups:]


def parts_of(name: str) -> tuple[str, ...]:
    if name.startswith("/"):
        raise Refused("invalid_path", "its name is absolute")
    if "\0" in name or len(name) > NAME_MAX:
        raise Refused("invalid_path", "its name can't be one")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise Refused("invalid_path", "its name leads upwards")
    if len(parts) > DEPTH_MAX:
        raise Refused("name_too_long", "it is too deep")
    return parts


def move_into_place(temporary: str, name: str, parent: int, overwrite: bool) -> None:
    """Over a file or a link, never over a directory; without `overwrite` over nothing."""
    try:
        found: os.stat_result | None = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        found = None
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if found is not None and not overwrite:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)


def temporary_name() -> str:
    return f".cloche-{secrets.token_hex(8)}.part"


def set_time(descriptor: int, member: Member) -> None:
    if 0 <= member.mtime_ns <= TIME_NS_MAX:
        with contextlib.suppress(OSError, OverflowError):
            os.utime(descriptor, ns=(member.mtime_ns, member.mtime_ns))


def current_umask() -> int:
    """Read, not set and set back: another thread may be making files."""
    try:
        found = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1], 8) if found else 0o022
