"""A node whose daemon is `interceptor_probe.py`, and the environment that tests of the real interceptor share."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloche_server.egress.interception import interpreter
from cloche_server.egress.interception.environment import PIP, name_of
from cloche_server.node.launch.places import NodePaths
from cloche_server.node.launch.up import up
from tests.unit.keeper import harness
from tests.unit.keeper.harness import Node

PROBE = Path(__file__).with_name("interceptor_probe.py")
CACHE = Path.home() / ".cache" / "cloche-build"
DOUBLE = Path(__file__).parents[2] / "unit" / "interception" / "double.py"


SANDBOX, OTHER = "s" + "1" * 19, "s" + "2" * 19
LINEAGE = "l" + "1" * 19


class InterceptorNode(Node):
    """The real keeper and launcher; the daemon is the probe."""

    def start(self) -> None:
        self.paths.api_socket.unlink(missing_ok=True)
        self.pid = up(self.paths, mode=self.mode, more=self._more, program=(str(PROBE),))
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(90)
        self._connection.connect(str(self.paths.api_socket))
        self._lines = self._connection.makefile("rb")


def shared_environment() -> Path:
    """The interceptor's packages, installed once for all tests of this machine."""
    found = interpreter.find()
    assert found is not None, interpreter.why_none(interpreter.versions_tested())
    name = name_of(found.version)
    place = CACHE / f"interceptor-{name}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "interceptor.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            making = Path(tempfile.mkdtemp(prefix=".interceptor-", dir=CACHE))
            subprocess.run([str(found.executable), "-I", "-m", "venv", str(making)], check=True)
            pip = [str(making / "bin" / "python"), "-I", "-m", "pip", *PIP, "-q", "-r", str(interpreter.LOCK_FILE)]
            subprocess.run(pip, check=True)
            making.chmod(0o755)
            making.rename(place)
    return place


def place_environment(state: Path, lock: Path, *, real: bool) -> None:
    """As if the daemon had made it: whole, by links where the disk can."""
    found = interpreter.find()
    assert found is not None
    target = state / "interceptor" / name_of(found.version, lock)
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    if real:
        done = subprocess.run(["cp", "-al", str(shared_environment()), str(target)], check=False, capture_output=True)
        if done.returncode != 0:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(shared_environment(), target, symlinks=True)
    else:
        (target / "lib" / f"python{found.version}" / "site-packages").mkdir(parents=True)


@contextmanager
def interceptor_node(
    *,
    real: bool = True,
    environment: bool = True,
    roots: bytes | None = None,
    lock: str = "",
    more: tuple[str, ...] = (),
) -> Iterator[InterceptorNode]:
    """`real`: with the interceptor itself; else with the double of `tests/unit/interception`."""
    mode = "machine" if os.getuid() == 0 else "user"
    base = Path(tempfile.mkdtemp(prefix="cloche-test-"))
    base.chmod(0o755)
    paths = NodePaths(base / "state", base / "run", harness.IMAGES)
    paths.state.mkdir(mode=0o755)
    if roots is not None:
        (paths.state / "extra.pem").write_bytes(roots)
        (paths.state / "extra.pem").chmod(0o644)
    if not real:
        program = base / "double"
        program.mkdir()
        shutil.copyfile(DOUBLE, program / "main.py")
        (program / "main.py").chmod(0o644)
        (program / "requirements.lock").write_text(lock)
        more = ("--double", str(program), *more)
    if environment:
        place_environment(paths.state, interpreter.LOCK_FILE if real else program / "requirements.lock", real=real)
    made = InterceptorNode(paths, mode, more)
    try:
        made.start()
        yield made
        made.ask("stop")
    finally:
        made.stop()
        log = base / "state" / "logs" / "daemon.log"
        if log.exists() and b"Traceback" in log.read_bytes():
            print(log.read_text())
        shutil.rmtree(base, ignore_errors=True)


def opened(node: InterceptorNode, host: str, **fields: object) -> int:
    return int(node.ask("open", sandbox=SANDBOX, lineage=LINEAGE, host=host, **fields))


def whole(node: InterceptorNode, conn: int) -> str:
    """All that comes until the end."""
    text = ""
    while piece := node.ask("receive", conn=conn):
        text += piece
    return text


def only(node: InterceptorNode) -> dict[str, int]:
    [found] = [row for row in node.ask("processes") if row["alive"]]
    return dict(found)


def over(node: InterceptorNode, conn: int) -> bool:
    return bool(node.ask("seen", conn=conn)["over"])
