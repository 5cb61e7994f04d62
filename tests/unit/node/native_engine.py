"""An engine for tests only: the agent as a plain process in a pid namespace, no walls at all.

It is what lets the node be tested in milliseconds. A `Holder` in the test's process keeps a copy of each channel, as the
keeper does, so that a daemon in another process can be killed and its successor can adopt.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path

from cloche_server.engines.contract import (
    Capabilities,
    EngineError,
    InstanceStats,
    IsolationReport,
    ProcessEnd,
    Unsupported,
)
from cloche_server.engines.spec import SandboxSpec

ROOT = Path(__file__).parents[3]
BUILT = ROOT / "guest-agent/target/x86_64-unknown-linux-musl/release/cloche-guest"


def agent() -> Path | None:
    """The agent that was built last: by cargo in this checkout, or by `just setup`."""
    packed = ROOT / "packages/cloche-engine/src/cloche_engine/bin/cloche-guest-x86_64"
    found = [path for path in (BUILT, packed) if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime) if found else None


def can_run() -> bool:
    return agent() is not None and os.geteuid() == 0 and shutil.which("unshare") is not None


class Holder:
    """The keeper's part: one verb for each of put, get, drop, over a socket, in a thread of the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held: dict[str, tuple[int, int]] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(16)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        message, fds, _, _ = socket.recv_fds(connection, 4096, 1)
        if not message:
            return
        asked = json.loads(message)
        known = self.held.get(asked["id"])
        if asked["verb"] == "put":
            self.held[asked["id"]] = (asked["pid"], fds[0])
            connection.sendall(b"{}")
        elif asked["verb"] == "drop":
            if known is not None:
                os.close(self.held.pop(asked["id"])[1])
            connection.sendall(b"{}")
        elif known is None:
            connection.sendall(b"{}")
        else:
            socket.send_fds(connection, [json.dumps({"pid": known[0]}).encode()], [known[1]])

    def close(self) -> None:
        self._listener.close()
        for pid, fd in self.held.values():
            _kill(pid)
            os.close(fd)


def ask_holder(path: Path, fd: int | None = None, **message: object) -> tuple[dict[str, int], list[int]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(path))
        data = json.dumps(message).encode()
        if fd is None:
            connection.sendall(data)
        else:
            connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        answer, fds, _, _ = socket.recv_fds(connection, 4096, 1)
        return json.loads(answer), list(fds)


class NativeEngine:
    name = "gvisor"
    version = "native"

    def __init__(self, holder: Path | None = None, argv: list[str] | None = None) -> None:
        found = agent()
        assert found is not None
        self._argv = argv or [str(found), "--no-mounts"]
        self._holder = holder
        self.fail_boot: EngineError | None = None
        self.oom_kills: dict[str, int] = {}
        self.instances: dict[str, NativeInstance] = {}

    def capabilities(self) -> Capabilities:
        return Capabilities(isolation_class="gvisor")

    async def boot(self, spec: SandboxSpec) -> NativeInstance:
        if self.fail_boot is not None:
            raise self.fail_boot
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                ["unshare", "--pid", "--fork", "--kill-child=SIGKILL", *self._argv],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        if self._holder is not None:
            ask_holder(self._holder, ours.fileno(), verb="put", id=spec.id, pid=process.pid)
        return self._instance(spec.id, process.pid, ours)

    async def adopt(self, spec: SandboxSpec) -> NativeInstance | ProcessEnd:
        assert self._holder is not None
        said, fds = ask_holder(self._holder, verb="get", id=spec.id)
        if not fds:
            return ProcessEnd(0, None)
        channel = socket.socket(fileno=fds[0])
        if not is_alive(said["pid"]):
            channel.close()
            ask_holder(self._holder, verb="drop", id=spec.id)
            return ProcessEnd(0, None)
        return self._instance(spec.id, said["pid"], channel)

    def _instance(self, sandbox: str, pid: int, channel: socket.socket) -> NativeInstance:
        self.instances[sandbox] = NativeInstance(self, sandbox, pid, channel, self._holder)
        return self.instances[sandbox]


class NativeInstance:
    def __init__(
        self, engine: NativeEngine, sandbox: str, pid: int, channel: socket.socket, holder: Path | None
    ) -> None:
        self.id = sandbox
        self.pid = pid
        self.channel = channel
        self.sealed = False
        self._engine = engine
        self._holder = holder
        self._pidfd = os.pidfd_open(pid)
        self._gone = False

    def isolation(self) -> IsolationReport:
        return IsolationReport("gvisor", "native", "native", "none", 0, None, ("no-walls",))

    async def start(self) -> None: ...

    async def seal(self) -> None:
        self.sealed = True

    async def pause(self) -> None:
        raise Unsupported("pause")

    async def resume(self) -> None:
        raise Unsupported("resume")

    def stats(self) -> InstanceStats:
        return InstanceStats(1.0, 1 << 20, 1 << 20)

    async def wait_dead(self) -> None:
        loop, dead = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pidfd, dead.set)
        try:
            await dead.wait()
        finally:
            loop.remove_reader(self._pidfd)

    async def kill(self) -> ProcessEnd:
        if not self._gone:
            self._gone = True
            _kill(self.pid)
            if self._holder is not None:
                ask_holder(self._holder, verb="drop", id=self.id)
        return ProcessEnd(self._engine.oom_kills.get(self.id, 0), None)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:  # started by a daemon that is gone
        return


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
