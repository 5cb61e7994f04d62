"""The few system calls that Python 3.11 does not wrap. Each raises OSError; none decides anything."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
from typing import Final

CLONE_NEWNS: Final = 0x20000
CLONE_NEWCGROUP: Final = 0x2000000
CLONE_NEWUTS: Final = 0x4000000
CLONE_NEWIPC: Final = 0x8000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
MS_RDONLY: Final = 0x1
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_REMOUNT: Final = 0x20
MS_NOATIME: Final = 0x400
MS_NODIRATIME: Final = 0x800
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_SLAVE: Final = 0x80000
MS_RELATIME: Final = 0x200000
MNT_DETACH: Final = 2
NS_GET_PARENT: Final = 0xB702
SO_PEERPIDFD: Final = 77
_PR_SET_DUMPABLE: Final = 4
_PR_CAPBSET_DROP: Final = 24
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_SYS_OPENAT2: Final = 437
_SYS_MOUNT_SETATTR: Final = 442
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_MOUNT_ATTR_RDONLY: Final = 0x1
_MOUNT_ATTR_NOSUID: Final = 0x2
_RESOLVE_NO_MAGICLINKS: Final = 0x02
_RESOLVE_NO_SYMLINKS: Final = 0x04
_RESOLVE_BENEATH: Final = 0x08
_ST_RELATIME: Final = 0x1000
_ST_KEPT: Final = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    result = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount on {target}")


def bind_read_only(fd: int, target: str) -> None:
    """Bind what `fd` is open on (flags that an outer mount locked must be repeated in the remount)."""
    mount(f"/proc/self/fd/{fd}", target, None, MS_BIND)
    found = os.statvfs(target).f_flag
    kept = found & _ST_KEPT | (MS_RELATIME if found & _ST_RELATIME else 0)
    mount(None, target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def make_read_only(path: str) -> None:
    """Every mount at and below `path` in the caller's mount namespace, at once (Linux 5.12). Devices can still be written."""
    wanted = _MountAttributes(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    number, size = ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_size_t(ctypes.sizeof(wanted))
    result = _libc.syscall(
        number, _AT_FDCWD, os.fsencode(path), ctypes.c_uint(_AT_RECURSIVE), ctypes.byref(wanted), size
    )
    _check(result, f"mount_setattr {path}")


def unmount(target: str) -> None:
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def open_beneath(directory_fd: int, name: str, flags: int) -> int:
    """openat2: no symbolic link anywhere, nothing above `directory_fd`."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)
    number = ctypes.c_long(_SYS_OPENAT2)
    size = ctypes.c_size_t(ctypes.sizeof(how))
    return _check(_libc.syscall(number, directory_fd, os.fsencode(name), ctypes.byref(how), size), f"open {name}")


def be_subreaper() -> None:
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(subreaper)")


def be_dumpable() -> None:
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl(dumpable)")


def forbid_new_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(no_new_privs)")


def empty_bounding_set() -> None:
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            if capability == 0:
                _check(-1, "prctl(capbset_drop)")
            return


def parent_namespace(fd: int) -> int:
    """A descriptor of the user namespace above; OSError(EPERM) when that is not below the caller's own."""
    return fcntl.ioctl(fd, NS_GET_PARENT)


def peer_pidfd(connection: socket.socket, pid: int) -> int:
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:  # before Linux 6.5: the peer is connected now, so the pid is still its own
        return os.pidfd_open(pid)


def send_kill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return  # dead already: what was wanted
