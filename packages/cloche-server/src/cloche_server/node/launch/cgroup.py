"""Delegated cgroup directories: find them, make them (root), remove them (root).

Version 1: one directory for each controller, owned by the user, its limits root's. Version 2: one directory that
the daemon already is in, owned by the user, because the kernel lets nobody but root bring a process into another branch.
"""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cloche.wire.errors import error
from cloche_server.keeper.cgroups import V1_CONTROLLERS, V2, Cgroup, put

ROOT: Final = Path("/sys/fs/cgroup")
V1_NEEDED: Final = ("memory", "pids", "cpu")
V2_NEEDED: Final = ("memory", "pids", "cpu")
IN_A_SCOPE: Final = "systemd-run --user --scope -p Delegate=yes cloche up"
"""Version 2: systemd gives a user's own scope to him, with whatever is started in it."""
NODE_CHILD: Final = "node"
"""Version 2: where daemon and keeper are, since a cgroup with children may not have processes of its own."""


def version() -> int:
    return 2 if (ROOT / "cgroup.controllers").exists() else 1


def v1_mounts() -> dict[str, Path]:
    """Controller → its hierarchy's root. Two names may lead to one hierarchy (cpu,cpuacct)."""
    found: dict[str, Path] = {}
    seen: set[tuple[int, int]] = set()
    for controller in V1_CONTROLLERS:
        path = ROOT / controller
        if not path.is_dir():
            continue
        at = path.stat()
        if (at.st_dev, at.st_ino) not in seen:
            seen.add((at.st_dev, at.st_ino))
            found[controller] = path
    return found


def names_for(uid: int) -> tuple[str, ...]:
    return ("cloche", f"cloche-{uid}")


def find(uid: int) -> tuple[Cgroup | None, str]:
    """(the delegated parents, or None; what was found or is missing)."""
    return _find_v1(uid) if version() == 1 else find_v2(uid, Path("/proc/self/cgroup").read_text())


def _find_v1(uid: int) -> tuple[Cgroup | None, str]:
    mounts = v1_mounts()
    missing = [name for name in V1_NEEDED if name not in mounts]
    if missing:
        return None, f"cgroup v1 without the controllers {', '.join(missing)}"
    for name in names_for(uid):
        dirs = {controller: path / name for controller, path in mounts.items() if _owned(path / name, uid)}
        if all(controller in dirs for controller in V1_NEEDED):
            return Cgroup(1, {controller: str(path) for controller, path in dirs.items()}), f"v1, {name}"
    return None, f"cgroup v1: no directory cloche-{uid} owned by uid {uid} in each of {', '.join(V1_NEEDED)}"


def _owned(path: Path, uid: int) -> bool:
    try:
        return path.stat().st_uid == uid and (path / "cgroup.procs").stat().st_uid == uid
    except FileNotFoundError:
        return False


def own_v2(text: str) -> str:
    """The caller's own cgroup from /proc/self/cgroup."""
    for line in text.splitlines():
        if line.startswith("0::"):
            return line[3:]
    return "/"


def find_v2(uid: int, processes_own: str) -> tuple[Cgroup | None, str]:
    """Only the branch that the process is in (`processes_own` is its /proc/self/cgroup): it may not enter another one."""
    path = ROOT / own_v2(processes_own).lstrip("/")
    if path.name == NODE_CHILD:
        path = path.parent
    if not _owned(path, uid):
        return None, f"cgroup v2: the daemon's own cgroup {path} is not owned by uid {uid}"
    have = set((path / "cgroup.controllers").read_text().split())
    missing = [name for name in V2_NEEDED if name not in have]
    if missing:
        return None, f"cgroup v2: {path} lacks the controllers {', '.join(missing)}"
    return Cgroup(2, {V2: str(path)}), f"v2, {path}"


def occupy_v2(cgroup: Cgroup) -> None:
    """Move the caller into the child `node`, then give the controllers to the children."""
    parent = Path(cgroup.dirs[V2])
    (parent / NODE_CHILD).mkdir(exist_ok=True)
    put(str(parent / NODE_CHILD / "cgroup.procs"), "0")
    put(str(parent / "cgroup.subtree_control"), " ".join(f"+{name}" for name in V2_NEEDED))


def delegate(user: str) -> list[Path]:
    """`sudo cloche delegate USER`: directories that the user's own node finds. Version 1 only (see `find_v2`)."""
    found = _account(user)
    if version() != 1:
        raise error(
            "unsupported",
            f"With cgroup version 2 a cgroup made now is of no use to {user}: no process of his is in it or may enter it.",
            fix=f"Nothing needs to be given to him; as {user}, type: {IN_A_SCOPE}",
        )
    return give(found.pw_uid, found.pw_gid, f"cloche-{found.pw_uid}")


def undelegate(user: str) -> list[Path]:
    return take_back(f"cloche-{_account(user).pw_uid}")


def _account(user: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        raise error("no_such_user", f"This machine has no user {user!r}.", fix="Name a user of this machine.") from None


def give(uid: int, gid: int, name: str) -> list[Path]:
    """As root: make the directories and give them away; their limits stay root's."""
    made = []
    for path in _delegated_paths(name):
        path.mkdir(exist_ok=True)
        made.append(path)
        for file in ("", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control"):
            if (path / file).exists():
                os.chown(path / file, uid, gid)
    return made


def take_back(name: str) -> list[Path]:
    """As root: remove them; what was removed. One in which a sandbox of another node lives is still needed, and stays."""
    return [path for path in _delegated_paths(name) if path.exists() and _remove_tree(path)]


def _remove_tree(path: Path) -> bool:
    """Looks before it removes: beside a living sandbox, an empty directory may be one that is being set up."""
    children = [child for child in path.iterdir() if child.is_dir()]
    if any((child / "cgroup.procs").read_text() for child in children):
        return False
    return all(_remove(child) for child in children) and _remove(path)


def _remove(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError as busy:
        if busy.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True


def _delegated_paths(name: str) -> Iterator[Path]:
    if version() == 1:
        for path in v1_mounts().values():
            yield path / name
    else:
        put(str(ROOT / "cgroup.subtree_control"), " ".join(f"+{controller}" for controller in V2_NEEDED))
        yield ROOT / name
