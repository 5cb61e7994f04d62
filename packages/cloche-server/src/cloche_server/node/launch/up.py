"""The launcher: prepares, starts the daemon detached, writes the keeper's map if it is root, waits, and is gone."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Final, NoReturn

from cloche.wire.errors import TABLE, ClocheError, error
from cloche_server.egress.interception import interpreter
from cloche_server.keeper import kernel
from cloche_server.keeper.cgroups import put
from cloche_server.node.launch import cgroup as cgroups
from cloche_server.node.launch.compiled import compiling
from cloche_server.node.launch.ids import IdRange
from cloche_server.node.launch.keepers import MAPPER_VARIABLE
from cloche_server.node.launch.places import NodePaths
from cloche_server.node.launch.prepare import Prepared, prepare_root, prepare_user
from cloche_server.node.launch.reach import needed_paths, open_up

DAEMON: Final = ("-m", "cloche_server.node")
NO_PLUGINS: Final = {"PYDANTIC_DISABLE_PLUGINS": "__all__"}
"""Else every installed distribution is asked whether it has one: time, and code that nobody chose."""
UP_S: Final = 60.0
LOOK_MS: Final = 5
END_S: Final = 10.0
TAIL_BYTES_MAX: Final = 4000
HEALTH: Final = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def up(
    paths: NodePaths,
    *,
    mode: str,
    accept: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
    program: tuple[str, ...] = DAEMON,
) -> int:
    """Start the node if it does not answer already. Returns the daemon's pid (0 when it was there before)."""
    if is_healthy(paths.api_socket):
        return 0
    prepared = prepare_root(paths, accept) if mode == "machine" else prepare_user(paths, accept)
    argv = _daemon_argv(paths, mode, accept, more, program)
    log_start = paths.daemon_log.stat().st_size if paths.daemon_log.exists() else 0
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_daemon(argv, paths, prepared, mode, theirs)
    theirs.close()
    with ours, compiling() if mode == "machine" else nullcontext():
        _wait_up(pid, paths, prepared, mode, ours, log_start)
    return pid


def replace(
    paths: NodePaths,
    *,
    mode: str,
    accept: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
    program: tuple[str, ...] = DAEMON,
) -> int:
    """End the living daemon, if there is one, then start one. Keeper and sandboxes go on meanwhile."""
    pid = daemon_pid(paths.api_socket)
    if pid is not None:
        end_process(pid)
    return up(paths, mode=mode, accept=accept, more=more, program=program)


def daemon_pid(api_socket: Path) -> int | None:
    """Who listens on the API's socket, by the kernel's word."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2.0)
            connection.connect(str(api_socket))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    except OSError:  # nobody there
        return None
    return int(struct.unpack("iII", credentials)[0])


def end_process(pid: int) -> None:
    """SIGTERM, and SIGKILL for one that does not go; by pidfd, so that a number used again is never hit."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(pidfd, number)
            if select.select([pidfd], [], [], END_S)[0]:
                return
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)


def _daemon_argv(
    paths: NodePaths, mode: str, accept: tuple[str, ...], more: tuple[str, ...], program: tuple[str, ...]
) -> list[str]:
    argv = [sys.executable, *program, "--mode", mode, "--state-dir", str(paths.state)]
    argv += ["--run-dir", str(paths.run), "--images-dir", str(paths.images), "--store-dir", str(paths.store)]
    argv += ["--keeper-socket", str(paths.keeper_socket), "--config-dir", str(paths.config(mode))]
    return argv + (["--accept", ",".join(accept)] if accept else []) + list(more)


def _become_daemon(argv: list[str], paths: NodePaths, prepared: Prepared, mode: str, mapper: socket.socket) -> NoReturn:
    """In the child: lose the terminal, and in machine mode every privilege, for good."""
    try:
        os.setsid()
        environment: Mapping[str, str] = {**os.environ, **NO_PLUGINS}
        if mode == "machine":
            _enter_cgroup_v2()
            open_up(needed_paths(paths.images), prepared.uid, prepared.gid)
            environment = _machine_environment(paths)
            drop_privileges(prepared.uid, prepared.gid)
        log = os.open(paths.daemon_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.set_inheritable(mapper.fileno(), True)
        fd = os.dup2(mapper.fileno(), 3)
        os.closerange(4, 1 << 16)
        os.umask(0o077)
        os.chdir("/")
        os.execve(argv[0], argv, {**environment, MAPPER_VARIABLE: str(fd)} if mode == "machine" else environment)
    except BaseException as failure:  # the child must not unwind into the launcher
        os.write(2, f"cloche: the daemon could not be executed: {failure!r}\n".encode())
    finally:
        os._exit(70)


def _enter_cgroup_v2() -> None:
    if cgroups.version() == 2 and (cgroups.ROOT / "cloche").is_dir():
        node = cgroups.ROOT / "cloche" / cgroups.NODE_CHILD
        node.mkdir(exist_ok=True)
        put(str(node / "cgroup.procs"), "0")
        put(str(cgroups.ROOT / "cloche" / "cgroup.subtree_control"), " ".join(f"+{c}" for c in cgroups.V2_NEEDED))


_FOR_NODE: Final = re.compile(
    r"(CLOCHE|PIP)_.*|(?i:npm_config_registry)|CARGO_REGISTRIES_.*_INDEX|CARGO_SOURCE_.*_(REGISTRY|REPLACE_WITH)"
)


def _machine_environment(paths: NodePaths) -> dict[str, str]:
    """Of the operator's own only what is meant for a node, and which mirrors his package tools use (no token of theirs)."""
    kept = {name: value for name, value in os.environ.items() if _FOR_NODE.fullmatch(name)}
    python = interpreter.find()  # as the launcher's user sees it: the system user may not look there
    if python is not None:
        kept[interpreter.VARIABLE] = str(python.executable)
    return {
        **kept,
        **NO_PLUGINS,
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(paths.state),
        "LANG": "C.UTF-8",
    }


def drop_privileges(uid: int, gid: int) -> None:
    """To an ordinary user with an empty bounding set and no_new_privs: nothing can be won back by any program."""
    kernel.empty_bounding_set()
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    kernel.forbid_new_privileges()


def _wait_up(pid: int, paths: NodePaths, prepared: Prepared, mode: str, mapper: socket.socket, log_start: int) -> None:
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if mode == "machine":
        poll.register(mapper, select.POLLIN)
    deadline = time.monotonic() + UP_S
    while time.monotonic() < deadline:
        for fd, _ in poll.poll(LOOK_MS):
            if fd == pidfd:
                os.waitpid(pid, 0)
                raise _said(_tail(paths.daemon_log, log_start))
            if not write_asked_map(mapper, pid, prepared):
                poll.unregister(mapper)
        if is_healthy(paths.api_socket):
            os.close(pidfd)
            return
    raise error("node_unavailable", f"The daemon did not answer in {UP_S:.0f} s: {_tail(paths.daemon_log, log_start)}")


def _said(last_line: str) -> ClocheError:
    """Why the daemon ended: by its own name for it, when the last line of its log has one."""
    try:
        said = json.loads(last_line)
        code, text, fix = said["code"], str(said["message"]), said.get("fix")
    except (ValueError, KeyError, TypeError):  # not a line of ours
        code, text, fix = "", "", None
    if code not in TABLE:
        return error("node_unavailable", f"The daemon ended at once: {last_line}", fix="See why: cloche node logs")
    return error(code, text, fix=fix)


def write_asked_map(mapper: socket.socket, daemon: int, prepared: Prepared) -> bool:
    """One request of the daemon: write the map of its own child. False when the daemon has hung up."""
    asked = mapper.recv(32)
    if not asked:
        return False
    try:
        pid = int(asked)
        if _status_of(pid) != (daemon, prepared.uid):
            raise ValueError(f"process {pid} is not a child of the daemon")
        write_maps(pid, prepared.uid, prepared.gid, prepared.ids)
        mapper.sendall(b"ok")
    except (ValueError, OSError) as failure:
        mapper.sendall(str(failure).encode()[:400] or b"failed")
    return True


def write_maps(pid: int, uid: int, gid: int, ids: IdRange) -> None:
    put(f"/proc/{pid}/uid_map", ids.map_text(uid))
    put(f"/proc/{pid}/gid_map", ids.map_text(gid))


def _status_of(pid: int) -> tuple[int, int]:
    """(parent, real uid)"""
    fields = {}
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            name, _, value = line.partition(":")
            fields[name] = value.split()
    return int(fields["PPid"][0]), int(fields["Uid"][0])


def is_healthy(api_socket: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(2.0)
            connection.connect(str(api_socket))
            connection.sendall(HEALTH)
            return b" 200 " in connection.recv(64)
    except OSError:  # not there yet, or not any more
        return False


def _tail(log: Path, start: int) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES_MAX))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except FileNotFoundError:
        lines = []
    return lines[-1] if lines else f"nothing in {log}"
