"""The keeper's process: enter the big user namespace, execute itself again there, prepare, serve.

It is executed twice because the kernel binds a process's memory to the namespace in which it was executed: only
so may it write its children's maps, and may the daemon find its namespaces in /proc.
"""

from __future__ import annotations

import binascii
import fcntl
import gc
import json
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from cloche_server.keeper import kernel, points
from cloche_server.keeper.cgroups import Cgroup
from cloche_server.keeper.loop import Loop
from cloche_server.keeper.peers import log
from cloche_server.keeper.records import OWNER_ID, Records, boot_id
from cloche_server.keeper.sandboxes import FIRST_ID, House, command_of
from cloche_server.keeper.serve import Keeper
from cloche_server.keeper.steps import remove_tree
from cloche_server.keeper.verbs import GENERATION
from cloche_server.keeper.view import View

LOCK_S: Final = 5.0
BACKLOG: Final = 8


@dataclass(frozen=True)
class Settings:
    """Given by the daemon that starts the keeper, as one JSON argument; never by a message."""

    directory: str
    """The keeper's own directory."""
    socket: str
    images: str
    """Root file systems made elsewhere."""
    store: str
    """The image store, for what is below its `roots/`."""
    engines: dict[str, str]
    """Engine name → directory of its binaries."""
    beside: dict[str, str]
    """Name → another directory that an engine's command line needs."""
    cgroups: dict[str, Any] | None
    stage: str
    """`new` namespace, `join` one by a descriptor, or `serve` (inside)."""
    join_fd: int = -1
    ready_fd: int = -1
    go_fd: int = -1


def main(argv: list[str]) -> int:
    settings = Settings(**json.loads(argv[1]))
    if settings.stage != "serve":
        _enter(settings)
        inside = {**settings.__dict__, "stage": "serve", "join_fd": -1, "ready_fd": -1, "go_fd": -1}
        os.execv(sys.executable, [sys.executable, "-I", "-S", argv[0], json.dumps(inside)])
    return _serve(settings)


def _enter(settings: Settings) -> None:
    if settings.stage == "join":
        kernel.setns(settings.join_fd, kernel.CLONE_NEWUSER)
        os.close(settings.join_fd)
    else:
        kernel.unshare(kernel.CLONE_NEWUSER)
        os.write(settings.ready_fd, b"u")
        if os.read(settings.go_fd, 1) != b"g":
            raise SystemExit("keeper: nobody wrote the map of its user namespace")
        os.close(settings.ready_fd)
        os.close(settings.go_fd)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_SLAVE)


def id_map() -> tuple[int, int]:
    """(first host id, how many) of the range that is mapped from inside id 1 on."""
    with open("/proc/self/uid_map") as file:
        for line in file:
            inside, outside, count = map(int, line.split())
            if inside == 1:
                return outside, count
    raise SystemExit("keeper: its user namespace has no range of ids")


def _own_directory(path: str) -> None:
    """The keeper's directory and the two below it, out of the daemon's reach."""
    for name, mode in (("", 0o700), ("/records", 0o700), ("/work", 0o711)):
        with suppress(FileExistsError):
            os.mkdir(path + name, mode)
        fd = os.open(path + name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        os.fchown(fd, OWNER_ID, OWNER_ID)
        os.fchmod(fd, mode)
        os.close(fd)


def _lock(directory: str) -> int:
    """One keeper a directory. A predecessor that is just ending gets a moment, and may remove what we opened."""
    deadline = time.monotonic() + LOCK_S
    while time.monotonic() < deadline:
        _own_directory(directory)
        try:
            fd = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink > 0:
                return fd
        except BlockingIOError:
            time.sleep(0.01)
        os.close(fd)
    raise SystemExit("keeper: another keeper holds this directory")


def _listen(path: str) -> socket.socket:
    """The lock is held, so whatever is at the path is a predecessor's."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    short = f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    with suppress(FileNotFoundError):
        os.unlink(short)
    old = os.umask(0o177)
    listener.bind(short)
    os.umask(old)
    os.close(directory)
    listener.listen(BACKLOG)
    return listener


def _serve(settings: Settings) -> int:
    points.reached("keeper.start")
    kernel.be_subreaper()
    os.umask(0o022)
    base, count = id_map()
    lock = _lock(settings.directory)
    work = f"{settings.directory}/work"
    view = View(
        engines=settings.engines,
        beside=settings.beside,
        images=settings.images,
        store=settings.store,
        work=work,
        avoid=(sys.executable, sys.base_prefix, __file__, settings.directory, settings.socket),
    )
    cgroups = None if settings.cgroups is None else Cgroup.from_object(settings.cgroups)
    slots = (count - FIRST_ID) // 2
    first_slot = binascii.crc32(settings.directory.encode()) % slots
    house = House(Loop(), Records(f"{settings.directory}/records"), view, work, cgroups, slots, first_slot)
    for engine in settings.engines:
        command_of(engine)
    facts = {
        "generation": GENERATION,
        "pid": os.getpid(),
        "boot_id": boot_id(),
        "id_base": base,
        "id_count": count,
        "user_namespace": os.stat("/proc/self/ns/user").st_ino,
        "mount_namespace": os.stat("/proc/self/ns/mnt").st_ino,
        "cgroups": settings.cgroups,
        "beside": settings.beside,
    }
    keeper = Keeper(house, _listen(settings.socket), facts)
    log(f"serving, pid {os.getpid()}, ids {base}+{count}")
    gc.collect()
    gc.freeze()  # a fork then copies fewer pages
    house.loop.run()
    if keeper.is_empty:  # its files belong to ids that only a keeper can be: leave none behind
        remove_tree(settings.directory)
    os.close(lock)
    return 0
