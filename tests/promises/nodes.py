"""A real node for tests, in directories of its own: start it, kill it, ask it, see what it leaves.

`RealNode` runs the product's own launcher and daemon. Its processes are those that the launcher named; nothing else is
ever signalled.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cloche.client import Node, Sandbox, Target
from cloche_server.node.launch.places import NodePaths, default_images_dir
from cloche_server.node.launch.up import up

ROOT = Path(__file__).parents[2]
CLI = Path(sys.executable).with_name("cloche")


def wait_until(true: Callable[[], object], seconds: float = 20.0, what: str = "") -> None:
    """Polls; the one place of the promises that sleeps."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or true}"
        time.sleep(0.01)


class RealNode:
    """One node of this machine (as root) or of this user."""

    def __init__(self, base: Path, *, images: Path | None = None, policy: str | None = None) -> None:
        """`policy`: the organisation's file, before the first start; `write_policy` changes it."""
        self.base = base
        self.mode = "machine" if os.getuid() == 0 else "user"
        config = base / "config"
        self.paths = NodePaths(base / "state", base / "run", images or default_images_dir(), config_dir=config)
        if policy is not None:
            self.write_policy(policy)
        self.pid = 0
        self.starts = 0

    # ---------------------------------------------------------------- its processes

    def with_interceptor(self) -> RealNode:
        """Its packages are there already, as if the node had made them: tests share one copy of them."""
        from cloche_server.egress.interception import interpreter
        from tests.promises.egress.interceptor_node import place_environment

        place_environment(self.paths.state, interpreter.LOCK_FILE, real=True)
        return self

    def start(self) -> None:
        """A daemon; one that finds a living keeper adopts its sandboxes."""
        self.pid = up(self.paths, mode=self.mode)
        assert self.pid, "a daemon was there already"
        self.starts += 1

    def write_policy(self, text: str) -> None:
        """The organisation's file. A node reads it again when it has changed."""
        directory = self.paths.config(self.mode)
        directory.mkdir(mode=0o755, exist_ok=True)
        scratch = directory / "policy.yaml.new"
        scratch.write_text(text)
        scratch.chmod(0o644)
        scratch.rename(directory / "policy.yaml")

    def kill_daemon(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def restart_daemon(self) -> None:
        self.kill_daemon()
        self.start()

    def keeper_pid(self) -> int:
        with self.client() as node:
            found = node.info().keeper_pid
        assert found
        return found

    def kill_keeper(self) -> None:
        """And wait until the daemon has put a successor in its place."""
        old = self.keeper_pid()
        os.kill(old, signal.SIGKILL)
        wait_until(
            lambda: self.keeper_pid() != old and os.path.exists(f"/proc/{self.keeper_pid()}"), what="a successor"
        )

    def stop(self) -> None:
        """Every sandbox, the daemon, the keeper. Also after a test that left the daemon dead."""
        if not self._daemon_lives():
            self.start()
        with self.client() as node:
            node.kill_all()
            keeper = node.info().keeper_pid
        for pid in (self.pid, keeper):
            if pid:
                _end(pid)

    def _daemon_lives(self) -> bool:
        try:
            return os.waitpid(self.pid, os.WNOHANG) == (0, 0)
        except ChildProcessError:
            return False

    # ---------------------------------------------------------------- asking it

    @property
    def target(self) -> Target:
        return Target("url", "http://cloche", str(self.paths.api_socket))

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "CLOCHE_URL": f"unix://{self.paths.api_socket}", "NO_COLOR": "1"}

    def client(self, *, request_timeout_s: float = 60.0) -> Node:
        return Node(self.target, request_timeout_s=request_timeout_s)

    @contextmanager
    def sandbox(self, **fields: object) -> Iterator[Sandbox]:
        """A sandbox that is gone at the end of the block."""
        with self.client() as node, Sandbox.create(node=node, **fields) as box:  # type: ignore[arg-type]
            yield box

    def cloche(self, *arguments: str, timeout_s: float = 120, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """The command line, as a user types it."""
        return subprocess.run(
            [str(CLI), *arguments],
            env=self.environment,
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )

    def daemon_rss_bytes(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")

    def log(self) -> str:
        return self.paths.daemon_log.read_text(errors="replace") if self.paths.daemon_log.exists() else ""


def _end(pid: int) -> None:
    try:
        held = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(held, number)
            try:
                wait_until(lambda: _is_gone(pid), seconds=10)
            except AssertionError:
                continue
            return
    except ProcessLookupError:
        return
    finally:
        os.close(held)


def _is_gone(pid: int) -> bool:
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@contextmanager
def real_node(
    *, images: Path | None = None, policy: str | None = None, interceptor: bool = False
) -> Iterator[RealNode]:
    base = Path(tempfile.mkdtemp(prefix="cloche-promise-"))
    base.chmod(0o755)
    node = RealNode(base, images=images, policy=policy)
    if interceptor:
        node.with_interceptor()
    try:
        node.start()
        yield node
    finally:
        try:
            node.stop()
        finally:
            text = node.log()
            if "Traceback" in text:
                sys.stderr.write(text[-20000:])
            shutil.rmtree(base, ignore_errors=True)
