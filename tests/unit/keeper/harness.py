"""Starts a `probe` by the real launcher and asks it; reads the host's /proc and cgroups for what is left."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cloche_server.engines.spec import SandboxSpec
from cloche_server.node.launch import cgroup as cgroups
from cloche_server.node.launch.places import NodePaths, default_images_dir
from cloche_server.node.launch.up import end_process, up

ROOT = Path(__file__).parents[3]
IMAGES = default_images_dir()
PROBE = Path(__file__).with_name("probe.py")
FAULTS = Path(__file__).with_name("faults.py")
HELLO, OPEN, OPENED, DATA, CREDIT, EOF, END, CONFIRM = range(1, 9)


class Refused(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


def new_id() -> str:
    return "s" + "".join(random.SystemRandom().choice("abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(19))


def spec(engine: str = "gvisor", **changes: Any) -> SandboxSpec:
    fields: dict[str, Any] = {
        "id": new_id(),
        "tenant": "t" + "0" * 19,
        "owner": "uid:0",
        "lineage": "l" + "0" * 19,
        "engine": engine,
        "image_file": "python.erofs",
        "cpus": 1.0,
        "memory_bytes": 256 << 20,
        "processes": 64,
        "disk_bytes": 256 << 20,
        "open_files": 1024,
    }
    return SandboxSpec(**{**fields, **changes})


class Node:
    """A running probe and its keeper."""

    def __init__(self, paths: NodePaths, mode: str, more: tuple[str, ...] = (), accept: tuple[str, ...] = ()) -> None:
        self.paths = paths
        self.mode = mode
        self._more = more
        self._accept = accept
        self._connection: socket.socket | None = None
        self.pid = 0
        self.known: set[str] = set()

    def start(self) -> None:
        self.paths.api_socket.unlink(missing_ok=True)
        self.pid = up(self.paths, mode=self.mode, accept=self._accept, more=self._more, program=(str(PROBE),))
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(90)
        self._connection.connect(str(self.paths.api_socket))
        self._lines = self._connection.makefile("rb")

    def kill_daemon(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        assert self._connection is not None
        self._connection.close()

    def ask(self, do: str, **fields: Any) -> Any:
        assert self._connection is not None
        self._connection.sendall(json.dumps({"do": do, **fields}).encode() + b"\n")
        answer = json.loads(self._lines.readline())
        if "error" in answer:
            raise Refused(answer["error"], answer["message"])
        return answer["ok"]

    def boot(self, wanted: SandboxSpec) -> dict[str, Any]:
        self.known.add(wanted.id)
        answer: dict[str, Any] = self.ask("boot", spec=json.loads(wanted.to_json()))
        return answer

    def keeper_pid(self) -> int:
        return int(self.ask("facts")["pid"])

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        keeper = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            keeper.connect(str(self.paths.keeper_socket))
            keeper_pid = struct.unpack("iII", keeper.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        except OSError:
            keeper_pid = 0
        finally:
            keeper.close()
        if self.pid:
            end_process(self.pid)
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        if keeper_pid:
            end_process(keeper_pid)

    # ------------------------------------------------------------------------ what is left

    def left(self, sandbox: str) -> list[str]:
        """Every process, cgroup, mount and file that names this sandbox."""
        found = [f"cgroup {path}" for path in _cgroup_dirs() if path.name == sandbox]
        found += [f"file {path}" for path in _walk(self.paths.keeper_dir) if sandbox in path.name]
        found += [f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if sandbox in line]
        for pid in os.listdir("/proc"):
            if pid.isdigit():
                try:
                    text = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/cgroup").read_bytes()
                except OSError:
                    continue
                if sandbox.encode() in text:
                    found.append(f"process {pid}")
        return found


def _cgroup_dirs() -> Iterator[Path]:
    for name in ("cloche", f"cloche-{os.getuid()}"):
        for controller in ("memory", "pids", "cpu", "cpuacct"):
            parent = cgroups.ROOT / controller / name
            if parent.is_dir():
                yield from (path for path in parent.iterdir() if path.is_dir())
        if (cgroups.ROOT / name).is_dir():
            yield from (path for path in (cgroups.ROOT / name).iterdir() if path.is_dir())


def _walk(directory: Path) -> Iterator[Path]:
    if os.access(directory, os.R_OK):
        yield from directory.rglob("*")


@contextmanager
def node(images: Path = IMAGES, more: tuple[str, ...] = (), accept: tuple[str, ...] = ()) -> Iterator[Node]:
    """A node of this machine (as root) or of this user, in directories of its own."""
    mode = "machine" if os.getuid() == 0 else "user"
    base = Path(tempfile.mkdtemp(prefix="cloche-test-"))
    base.chmod(0o755)
    made = Node(NodePaths(base / "state", base / "run", images, config_dir=base / "config"), mode, more, accept)
    try:
        made.start()
        yield made
        for sandbox in made.known:
            try:
                made.ask("end_by_id", sandbox=sandbox)
            except (OSError, Refused, ValueError):
                break
    finally:
        made.stop()
        log = base / "state" / "logs" / "daemon.log"
        if log.exists() and b"Traceback" in log.read_bytes():
            print(log.read_text())
        shutil.rmtree(base, ignore_errors=True)


def wait_until(true: Any, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.01)
    return False


# ------------------------------------------------------------------- the channel, by hand


def frame(kind: int, stream: int, payload: bytes = b"") -> bytes:
    head = struct.pack("<BII", kind, stream, len(payload)) + payload
    return head + struct.pack("<I", zlib.crc32(head))


def frames(data: bytes) -> list[tuple[int, int, bytes]]:
    found = []
    at = 0
    while at + 13 <= len(data):
        if data[at] == 0:
            at += 1
            continue
        kind, stream, length = struct.unpack_from("<BII", data, at)
        if at + 13 + length > len(data):
            break
        found.append((kind, stream, data[at + 9 : at + 9 + length]))
        at += 13 + length
    return found


class Guest:
    """Speaks just enough of the channel's protocol to see an exec through."""

    def __init__(self, node: Node, sandbox: str, data: bytes = b"", highest_stream: int = 0) -> None:
        self._node = node
        self._sandbox = sandbox
        self._data = data
        self._stream = highest_stream

    def expect(self, kind: int, stream: int, timeout_s: float = 30.0) -> bytes:
        while True:
            for found_kind, found_stream, payload in frames(self._data):
                if (found_kind, found_stream) == (kind, stream):
                    return payload
            more = bytes.fromhex(self._node.ask("receive", sandbox=self._sandbox, timeout_s=timeout_s))
            assert more, "the channel ended"
            self._data += more

    def hello(self) -> dict[str, Any]:
        greeting: dict[str, Any] = json.loads(self.expect(HELLO, 0))
        return greeting

    def open(self, op: str, **fields: Any) -> int:
        self._stream += 2
        payload = json.dumps({"op": op, **fields}).encode()
        self._node.ask("send", sandbox=self._sandbox, hexed=frame(OPEN, self._stream, payload).hex())
        return self._stream

    def result(self, stream: int) -> dict[str, Any]:
        end: dict[str, Any] = json.loads(self.expect(END, stream))
        self._node.ask("send", sandbox=self._sandbox, hexed=frame(CONFIRM, stream).hex())
        return end

    def bind(self) -> None:
        stream = self.open(
            "bind", hostname="box", machine_id="0" * 32, entropy="00" * 32, env={},
            tmp={"noexec": False, "size_bytes": None}, root_read_only=False,
            limits={"processes": 64, "open_files": 1024},
        )  # fmt: skip
        assert "ok" in self.result(stream)

    def start_command(self, *argv: str, user: str = "1000:1000") -> int:
        return self.open(
            "exec", command="c" + new_id()[1:], argv=list(argv), env={}, cwd="/", user=user, stdin=True, pty=None,
            privileges="none",
        )  # fmt: skip

    def output(self, stream: int) -> bytes:
        return b"".join(data for kind, number, data in frames(self._data) if (kind, number) == (DATA, stream))

    def run(self, *argv: str, user: str = "1000:1000") -> tuple[dict[str, Any], bytes]:
        stream = self.open(
            "exec", command="c" + new_id()[1:], argv=list(argv), env={}, cwd="/", user=user, stdin=False, pty=None,
            privileges="none",
        )  # fmt: skip
        end = self.result(stream)
        return end, self.output(stream)


def has_agent() -> bool:
    """Whether the built image has the guest agent in it."""
    try:
        return json.loads((IMAGES / "python.json").read_text())["agent"]["sha256"] is not None
    except (FileNotFoundError, KeyError):
        return False


def has_microvm() -> bool:
    return (ROOT / "build" / "microvm" / "manifest.json").is_file() and shutil.which("qemu-system-x86_64") is not None


def run_raw(paths: NodePaths, uid: int, messages: list[bytes]) -> list[dict[str, Any]]:
    """Send raw messages to the keeper as its own user from a fresh process; answers in order of arrival."""
    script = (
        "import socket,sys,json,os\n"
        f"os.setresgid({uid},{uid},{uid}) if os.getuid()==0 else None\n"
        f"os.setresuid({uid},{uid},{uid}) if os.getuid()==0 else None\n"
        "s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET); s.settimeout(10); s.connect(sys.argv[1])\n"
        "for line in sys.stdin:\n"
        "    s.send(bytes.fromhex(line)); sys.stdout.write(s.recv(70000).decode()+chr(10))\n"
    )
    done = subprocess.run(
        ["/usr/bin/python3", "-c", script, str(paths.keeper_socket)],
        input="".join(message.hex() + "\n" for message in messages), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
