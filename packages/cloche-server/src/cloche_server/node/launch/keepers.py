"""Keepers from within the daemon: find the living one, start one, replace a dead one, hand descriptors over.

A keeper's user namespace is made once and joined by every successor: from a sibling namespace signals to sandboxes
are refused. The daemon holds a descriptor of it, so a successor can start even when no sandbox lives.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import cloche_engine
from cloche.wire.errors import ClocheError, error
from cloche_server.egress.interception import interpreter
from cloche_server.engines.interceptor import command
from cloche_server.keeper import kernel
from cloche_server.keeper.client import KeeperClient, KeeperGone, KeeperRefused
from cloche_server.node.launch import cgroup as cgroups
from cloche_server.node.launch.ids import IdRange, own_range, recorded_range
from cloche_server.node.launch.places import NodePaths, microvm_dir
from cloche_server.node.launch.prepare import delegation_fix

MAPPER_VARIABLE: Final = "CLOCHE_MAPPER_FD"
"""Set by the root launcher: the socket over which it is told whose map to write."""
START_S: Final = 15.0
BUSY_S: Final = 5.0
END_S: Final = 5.0
REAP_S: Final = 2.0
"""Between two looks for children of dead keepers. Not by SIGCHLD: an event loop may keep that signal to itself."""
AGAIN_S: Final = 1.0
"""Between two tries to start a keeper while there is none."""
LOG_BYTES_MAX: Final = 4096
PROGRAM: Final = Path(__file__).resolve().parents[2] / "keeper" / "__main__.py"


_log = logging.getLogger(__name__)


class KeeperHouse:
    """The daemon's hold on its keeper: the client of the day, and the namespace that outlives every keeper."""

    def __init__(self, paths: NodePaths, *, mode: str, accept: tuple[str, ...] = (), program: Path = PROGRAM) -> None:
        self._paths = paths
        self._mode = mode
        self._accept = accept
        self._program = program
        self._namespace = -1
        self._client: KeeperClient | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._keepers: set[int] = set()
        """Every keeper that was in office: each leads the session of the children it forked."""
        self._lock = asyncio.Lock()

    @property
    def client(self) -> KeeperClient:
        """The keeper in office. While a successor is being started, calls on it raise KeeperGone."""
        assert self._client is not None, "ensure() was not awaited"
        return self._client

    @property
    def weaker(self) -> tuple[str, ...]:
        """What was given up by name *and* is really missing."""
        return ("no-cgroup",) if self.client.facts["cgroups"] is None else ()

    async def ensure(self) -> KeeperClient:
        """Connect to the living keeper, or start one. `node_busy` when another daemon lives."""
        kernel.be_subreaper()
        async with self._lock:
            client = await self._connect_living()
            if client is None:
                client = await self._start()
            self._hold(client)
            return client

    async def replace(self, channels: Mapping[str, socket.socket]) -> KeeperClient:
        """A successor for a keeper that is alive (upgrade) or dead, with the channels that the daemon kept."""
        async with self._lock:
            if self._client is not None and not self._client.gone.is_set():
                await self._client.stop()
            await self._reap()
            client = await self._start()
            self._hold(client)
            await self._hand_over(client, channels)
            return client

    async def show_interceptor(self, channels: Mapping[str, socket.socket]) -> None:
        """A successor, when the keeper was started before the interceptor's Python was there, or where it was."""
        wanted = beside_directories()
        if wanted and self.client.facts.get("beside") != wanted:
            await self.replace(channels)

    async def end_if_idle(self) -> None:
        """For a daemon that cannot serve after all: a keeper that holds nothing would be left for nobody."""
        with suppress(KeeperGone, KeeperRefused):
            if not await self.client.everything():
                await self.client.stop(purge=True)
                await self._reap()

    async def watch(self, channels: Callable[[], Mapping[str, socket.socket]]) -> None:
        """For ever: when the keeper dies, start a successor and give it the daemon's copies."""
        while True:
            try:
                async with asyncio.timeout(REAP_S):
                    await self.client.gone.wait()
            except TimeoutError:
                self._reap_orphans()
                continue
            try:
                await self.replace(channels())
            except (ClocheError, KeeperGone, KeeperRefused, OSError) as failure:
                _log.error("no keeper: %s", failure)
                await asyncio.sleep(AGAIN_S)

    async def _hand_over(self, client: KeeperClient, channels: Mapping[str, socket.socket]) -> None:
        held = await client.everything()
        for row in held:
            channel = channels.get(row.id)
            if row.alive and not row.channel and channel is not None and channel.fileno() >= 0:
                await client.adopt(row.id, channel)

    def _hold(self, client: KeeperClient) -> None:
        self._client = client
        self._keepers.add(client.pid)
        if self._namespace < 0:
            self._namespace = os.open(f"/proc/{client.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)

    async def _reap(self) -> None:
        """Its connection ends a moment before its process does. One that hangs in between is ended."""
        process, self._process = self._process, None
        if process is not None:
            try:
                await asyncio.to_thread(process.wait, END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        """A dead keeper's children are the daemon's (a subreaper). Its own children are for those who started them."""
        if not _has_zombie():
            return
        for pid, session, uid in zombies_of(os.getpid()):
            if pid not in self._keepers and (session in self._keepers or uid != os.getuid()):
                with suppress(ChildProcessError):
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)

    async def _connect_living(self) -> KeeperClient | None:
        for _ in range(int(BUSY_S / 0.1)):
            try:
                return await KeeperClient.connect(str(self._paths.keeper_socket))
            except (FileNotFoundError, ConnectionRefusedError):
                return None
            except KeeperGone:
                await asyncio.sleep(0.1)
            except KeeperRefused as refused:
                if refused.code != "busy":
                    raise error("keeper_failed", f"the living keeper refuses: {refused.message}") from None
                await asyncio.sleep(0.1)  # the other daemon may be dying
        raise error("node_busy", "another daemon holds this node's keeper")

    # -------------------------------------------------------------------------- start

    async def _start(self) -> KeeperClient:
        delegated, found = cgroups.find(os.getuid())
        if delegated is None and "no-cgroup" not in self._accept:
            raise error("no_cgroup_delegation", found, fix=delegation_fix(_user_name()))
        settings: dict[str, object] = {
            "directory": str(self._paths.keeper_dir),
            "socket": str(self._paths.keeper_socket),
            "images": str(self._paths.images),
            "store": str(self._paths.store),
            "engines": {**engine_directories(), **interceptor_directory(self._paths)},
            "beside": beside_directories(),
            "cgroups": None if delegated is None else delegated.to_object(),
        }
        namespace = self._namespace if self._namespace >= 0 else find_namespace(self._range())
        if namespace >= 0:
            self._namespace = namespace
            process = self._execute({**settings, "stage": "join", "join_fd": namespace}, (namespace,))
        else:
            process = await asyncio.to_thread(self._start_in_new_namespace, settings)
        self._process = process
        self._keepers.add(process.pid)
        return await self._connect_started(process)

    def _range(self) -> IdRange | None:
        if self._mode == "machine":
            return recorded_range(self._paths.range_file)
        return own_range(_user_name(), os.getuid())

    def _execute(self, settings: dict[str, object], fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
        self._paths.keeper_log.parent.mkdir(parents=True, exist_ok=True)
        with open(self._paths.keeper_log, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", str(self._program), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=fds,
                start_new_session=True,
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
            )

    def _start_in_new_namespace(self, settings: dict[str, object]) -> subprocess.Popen[bytes]:
        ready_in, ready_out = os.pipe2(os.O_CLOEXEC)
        go_in, go_out = os.pipe2(os.O_CLOEXEC)
        try:
            process = self._execute(
                {**settings, "stage": "new", "ready_fd": ready_out, "go_fd": go_in}, (ready_out, go_in)
            )
            os.close(ready_out)
            ready_out = -1
            if os.read(ready_in, 1) != b"u":
                process.wait()
                raise error("userns_forbidden", f"the keeper could not make its user namespace: {self._log_tail()}")
            self._write_maps(process.pid)
            os.write(go_out, b"g")
            return process
        finally:
            for fd in (ready_in, ready_out, go_in, go_out):
                if fd >= 0:
                    os.close(fd)

    def _write_maps(self, pid: int) -> None:
        if self._mode == "machine":
            ask_launcher(pid)
            return
        own = self._range()
        if own is None:
            raise error("no_subuids", f"/etc/subuid and /etc/subgid give no common range to {_user_name()}")
        for tool, one in (("newuidmap", os.getuid()), ("newgidmap", os.getgid())):
            argv = [tool, str(pid), "0", str(one), "1", "1", str(own.first), str(own.count)]
            try:
                done = subprocess.run(argv, capture_output=True, text=True, timeout=START_S, check=False)
            except FileNotFoundError:
                raise error("no_newuidmap", f"{tool} is not installed") from None
            if done.returncode != 0:
                raise error("userns_forbidden", f"{tool} failed: {done.stderr.strip()}")

    async def _connect_started(self, process: subprocess.Popen[bytes]) -> KeeperClient:
        deadline = asyncio.get_running_loop().time() + START_S
        while asyncio.get_running_loop().time() < deadline:
            try:
                client = await KeeperClient.connect(str(self._paths.keeper_socket))
            except (FileNotFoundError, ConnectionRefusedError, KeeperGone):
                if process.poll() is not None:
                    raise error("keeper_failed", f"the keeper ended at once: {self._log_tail()}") from None
                await asyncio.sleep(0.005)
                continue
            if client.pid == process.pid:
                return client
            client.close()  # a predecessor that is still about to end
            await asyncio.sleep(0.02)
        process.kill()
        raise error("keeper_failed", f"the keeper did not come up in {START_S:.0f} s: {self._log_tail()}")

    def _log_tail(self) -> str:
        with open(self._paths.keeper_log, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES_MAX))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"


def engine_directories() -> dict[str, str]:
    """What each engine starts. gVisor's must be there; microVMs are experimental and need not be."""
    found = {"gvisor": str(find_runsc().parent)}
    with suppress(cloche_engine.EngineMissing):
        found["converter"] = str(cloche_engine.agent_path().parent)
    microvm = microvm_dir()
    return found if microvm is None else {**found, "qemu": str(microvm)}


def interceptor_directory(paths: NodePaths) -> dict[str, str]:
    """Where its environments are made, at first need: shown to interceptors before there is one."""
    paths.interceptor_dir.mkdir(parents=True, exist_ok=True)
    with suppress(PermissionError):  # put there by somebody else, as he wants it
        paths.interceptor_dir.chmod(0o755)
    return {"interceptor": str(paths.interceptor_dir)}


def beside_directories() -> dict[str, str]:
    """What the interceptor reads beside its environment. Without an interpreter there is none, and it is missing by name."""
    found = interpreter.find()
    if found is None:
        return {}
    return {command.PYTHON: str(found.prefix), command.PROGRAM: str(interpreter.PROGRAM)}


def find_runsc() -> Path:
    try:
        return cloche_engine.runsc_path()
    except (cloche_engine.EngineMissing, cloche_engine.EngineUnwritable) as missing:
        raise error("engine_missing", str(missing)) from missing


def ask_launcher(pid: int) -> None:
    """Machine mode: only the root launcher can write the map, and it is there only during `sudo cloche up`."""
    number = os.environ.get(MAPPER_VARIABLE)
    if number is None:
        raise error("keeper_failed", "a new user namespace needs root for a moment: sudo cloche up --replace")
    with socket.socket(fileno=os.dup(int(number))) as mapper:
        mapper.settimeout(START_S)
        mapper.sendall(str(pid).encode())
        answer = mapper.recv(500)
    if answer != b"ok":
        raise error("keeper_failed", f"the launcher could not write the map: {answer.decode(errors='replace')}")


def _has_zombie() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def zombies_of(parent: int) -> list[tuple[int, int, int]]:
    """(pid, session, uid) of this process's children that ended and were not reaped."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            if fields[0] == b"Z" and int(fields[1]) == parent:
                found.append((int(name), int(fields[3]), _real_uid(name)))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def find_namespace(ids: IdRange | None) -> int:
    """The big namespace of a sandbox that outlived keeper and daemon, or -1: it must be joined, not made again."""
    if ids is None:
        return -1
    own = os.stat("/proc/self/ns/user").st_ino
    for name in os.listdir("/proc"):
        if not name.isdigit() or not _has_uid_in(name, ids):
            continue
        fd = _below(f"/proc/{name}/ns/user", own)
        if fd >= 0:
            return fd
    return -1


def _has_uid_in(pid: str, ids: IdRange) -> bool:
    try:
        return ids.first <= _real_uid(pid) < ids.first + ids.count
    except (FileNotFoundError, ProcessLookupError):
        return False


def _real_uid(pid: str) -> int:
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("Uid:"):
                return int(line.split()[1])
    raise ProcessLookupError(pid)


def _below(path: str, own: int) -> int:
    """From a namespace upwards to the one whose parent is ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the process ended, or is not of this node
        return -1
    while True:
        try:
            parent = kernel.parent_namespace(fd)
        except OSError:
            os.close(fd)
            return -1
        if os.fstat(parent).st_ino == own:
            os.close(parent)
            return fd
        os.close(fd)
        fd = parent


def _user_name() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


async def ensure_keeper(paths: NodePaths, *, mode: str, accept: tuple[str, ...] = ()) -> KeeperHouse:
    """What the daemon calls at its start: a house whose `client` is connected to the one living keeper."""
    house = KeeperHouse(paths, mode=mode, accept=accept)
    await house.ensure()
    return house
