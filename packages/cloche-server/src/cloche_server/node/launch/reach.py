"""An installation in a closed home, shown to the system user alone.

`sudo cloche up` may run from root's or somebody's private directory, which the system user cannot enter. The daemon then
gets a mount namespace of its own in which each closed directory is hidden by an empty one that holds just what
the node needs (interpreter, packages, images: read-only). Nothing on the host changes.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from cloche_server.egress.interception import interpreter
from cloche_server.keeper import kernel


def needed_paths(images: Path) -> list[Path]:
    """What the daemon and the keeper read: the interpreters, the environment, the packages, the images."""
    import cloche
    import cloche_engine
    import cloche_server

    found = [Path(sys.base_prefix), Path(sys.prefix), images]
    python = interpreter.find()
    if python is not None:
        found.append(python.prefix)
    for package in (cloche, cloche_server, cloche_engine):
        found += [Path(path) for path in package.__path__]
    return sorted({path.resolve() for path in found if path.exists()})


def closed_ancestor(path: Path, uid: int, gid: int) -> Path | None:
    """The topmost directory on the way (itself included) that this user cannot enter."""
    for directory in (*reversed(path.parents), path):
        found = directory.stat()
        if not stat.S_ISDIR(found.st_mode):
            return None
        if found.st_uid == uid:
            may = found.st_mode & stat.S_IXUSR
        elif found.st_gid == gid:
            may = found.st_mode & stat.S_IXGRP
        else:
            may = found.st_mode & stat.S_IXOTH
        if not may:
            return directory
    return None


def open_up(paths: Iterable[Path], uid: int, gid: int) -> list[Path]:
    """In the calling process (root, before it drops): hide what is closed, show what is needed. Returns the hidden."""
    closed: dict[Path, list[Path]] = {}
    for path in paths:
        ancestor = closed_ancestor(path, uid, gid)
        if ancestor is not None:
            closed.setdefault(ancestor, []).append(path)
    if not closed:
        return []
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_SLAVE)
    for ancestor, wanted in closed.items():
        sources = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in _outermost(wanted)]
        kernel.mount("cloche", str(ancestor), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
        for path, fd in sources:
            path.mkdir(parents=True, exist_ok=True)
            kernel.bind_read_only(fd, str(path))
            os.close(fd)
        kernel.mount(
            None,
            str(ancestor),
            None,
            kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV,
        )
    return sorted(closed)


def _outermost(paths: list[Path]) -> list[Path]:
    return [path for path in paths if not any(other in path.parents for other in paths)]
