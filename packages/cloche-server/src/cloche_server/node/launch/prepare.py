"""Before anything starts: what this host and user give, and by name what they do not.

Every refusal is an error of the public table with the precise reason; nothing is weakened here. `--accept` names what
the caller gives up: only `no-cgroup` can be given up in this version.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche.wire.errors import error
from cloche_server.node.launch import cgroup as cgroups
from cloche_server.node.launch.ids import IdRange, machine_range, own_range
from cloche_server.node.launch.places import SYSTEM_USER, NodePaths

ACCEPTABLE: Final = ("single-uid", "no-cgroup")
SYSCTLS: Final = {
    "/proc/sys/kernel/unprivileged_userns_clone": "0",
    "/proc/sys/user/max_user_namespaces": "0",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
}
"""Files that forbid user namespaces when they hold this value."""
APPARMOR_PROFILE: Final = Path("/etc/apparmor.d/cloche")
ROOT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where sudo looks for a program; a virtual environment is not in it."""


@dataclass(frozen=True)
class Prepared:
    """Who the daemon will be, and the ids that its sandboxes get."""

    uid: int
    gid: int
    ids: IdRange


def check_accept(accept: tuple[str, ...]) -> None:
    for name in accept:
        if name not in ACCEPTABLE:
            raise error("invalid_request", f"--accept {name}: known are {', '.join(ACCEPTABLE)}")
    if "single-uid" in accept:
        raise error(
            "unsupported",
            "this version always gives each sandbox a uid of its own; single-uid cannot be accepted.",
            fix="Get a subuid range and newuidmap instead: cloche doctor",
        )


def userns_obstacle() -> str | None:
    """What on this host forbids an unprivileged user namespace, in words; None when nothing does."""
    for path, forbidding in SYSCTLS.items():
        try:
            value = Path(path).read_text().strip()
        except FileNotFoundError:
            continue
        if value == forbidding and not (path.endswith("restrict_unprivileged_userns") and APPARMOR_PROFILE.exists()):
            return f"{path} is {value}"
    return None


def prepare_user(paths: NodePaths, accept: tuple[str, ...] = ()) -> Prepared:
    """A laptop: no root at all. Raises the error that names what is missing."""
    check_accept(accept)
    uid, gid = os.getuid(), os.getgid()
    name = pwd.getpwuid(uid).pw_name
    obstacle = userns_obstacle()
    if obstacle is not None:
        raise error("userns_forbidden", f"User namespaces are forbidden here: {obstacle}.")
    for tool in ("newuidmap", "newgidmap"):
        if shutil.which(tool) is None:
            raise error("no_newuidmap", f"{tool} is not installed.")
    ids = own_range(name, uid)
    if ids is None:
        raise error("no_subuids", f"/etc/subuid and /etc/subgid give no common range of 4,096 ids to {name}.")
    found, reason = cgroups.find(uid)
    if found is None and "no-cgroup" not in accept:
        raise error("no_cgroup_delegation", f"No delegated cgroup: {reason}.", fix=delegation_fix(name))
    private = (paths.state, paths.run, paths.daemon_log.parent, paths.store)
    for directory, mode in ((directory, 0o700) for directory in private):
        directory.mkdir(mode=mode, parents=True, exist_ok=True)
    return Prepared(uid, gid, ids)


def delegation_fix(name: str) -> str:
    if cgroups.version() == 1:
        return f"Delegate a cgroup: sudo {command_for_root()} delegate {name}"
    return f"Start it in a delegated scope: {cgroups.IN_A_SCOPE}"


def command_for_root() -> str:
    """`cloche` as it can be typed behind sudo: by its path, when root would not find it or find another one."""
    ours = Path(sys.executable).with_name("cloche")
    found = shutil.which("cloche", path=ROOT_PATH)
    if not ours.is_file() or (found is not None and os.path.realpath(found) == os.path.realpath(ours)):
        return "cloche"
    return str(ours)


def prepare_root(paths: NodePaths, accept: tuple[str, ...] = ()) -> Prepared:
    """`sudo cloche up`: system user, directories, cgroups, range of ids. Idempotent."""
    check_accept(accept)
    if os.geteuid() != 0:
        raise error("forbidden", "The machine's node is started by root.", fix="Use: sudo cloche up")
    user = ensure_system_user()
    own = ((paths.state, 0o711), (paths.run, 0o755), (paths.daemon_log.parent, 0o700), (paths.store, 0o755))
    for directory, mode in own:
        directory.mkdir(mode=mode, parents=True, exist_ok=True)
        directory.chmod(mode)
        os.chown(directory, user.pw_uid, user.pw_gid)
    paths.config("machine").mkdir(mode=0o755, parents=True, exist_ok=True)
    _make_keys(paths.keys("machine"), user)
    ids = machine_range(paths.range_file)
    if "no-cgroup" not in accept:
        cgroups.give(user.pw_uid, user.pw_gid, "cloche")
    return Prepared(user.pw_uid, user.pw_gid, ids)


def _make_keys(directory: Path, user: pwd.struct_passwd) -> None:
    """The one place below the configuration that the node's user may write."""
    directory.mkdir(mode=0o700, exist_ok=True)
    os.chown(directory, user.pw_uid, user.pw_gid)


def ensure_system_user() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        pass
    tool = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if tool is None:
        raise error(
            "keeper_failed",
            f"There is no user {SYSTEM_USER} and no useradd to make it.",
            fix=f"Make a system user named {SYSTEM_USER} and try again.",
        )
    argv = [tool, "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
    done = subprocess.run(
        [*argv, "--shell", "/usr/sbin/nologin", SYSTEM_USER], capture_output=True, text=True, check=False, timeout=30
    )
    if done.returncode != 0:
        raise error("keeper_failed", f"useradd could not make {SYSTEM_USER}: {done.stderr.strip()}")
    return pwd.getpwnam(SYSTEM_USER)
