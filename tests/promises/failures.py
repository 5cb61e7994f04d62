"""A real node in which one step of set-up or teardown fails, or in which daemon or keeper dies there."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cloche_server.node.launch.up import up
from tests.promises.nodes import RealNode, wait_until

SCRIPT = Path(__file__).with_name("evil") / "failing_daemon.py"
DAEMON_POINTS = tuple(f"node.create.after_{step}" for step in ("journal", "boot", "start", "hello", "bind"))
KEEPER_POINTS = tuple(
    f"keeper.boot.{step}"
    for step in ("record", "directories", "cgroups", "process", "maps", "spawned", "created", "done")
)
TEARDOWN_POINTS = (
    "keeper.kill.recorded",
    *(f"keeper.undo.{step}" for step in ("process", "cgroups", "directories", "record")),
)


class FailingNode(RealNode):
    """Its daemon is `evil/failing_daemon.py`."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.plant = base / "plant"
        self.plant.mkdir()
        self.plant.chmod(0o777)  # the daemon is another user, and renames its fault
        shutil.copyfile(SCRIPT, self.plant / SCRIPT.name)

    def start(self) -> None:
        self.pid = up(self.paths, mode=self.mode, program=(str(self.plant / SCRIPT.name), str(self.plant)))
        assert self.pid, "a daemon was there already"
        self.starts += 1

    def set_fault(self, how: str, point: str) -> None:
        new = self.plant / "fault.new"
        new.write_text(f"{how} {point}")
        new.chmod(0o644)
        new.rename(self.plant / "fault")

    def was_struck(self) -> bool:
        """Whether the fault has happened; tidies up behind it."""
        struck = (self.plant / "taken").exists()
        for name in ("fault", "taken"):
            (self.plant / name).unlink(missing_ok=True)
        return struck

    def await_death(self) -> None:
        """Until the daemon has died of SIGKILL."""
        status: list[int] = []

        def is_dead() -> bool:
            found, how = os.waitpid(self.pid, os.WNOHANG)
            status.extend([how] if found else [])
            return bool(status)

        wait_until(is_dead, 60, "the daemon's death")
        assert os.WTERMSIG(status[0]) == signal.SIGKILL


@contextmanager
def failing_node() -> Iterator[FailingNode]:
    base = Path(tempfile.mkdtemp(prefix="cloche-failing-"))
    base.chmod(0o755)
    node = FailingNode(base)
    try:
        node.start()
        yield node
    finally:
        node.was_struck()
        try:
            node.stop()
        finally:
            if "Traceback" in node.log():
                sys.stderr.write(node.log()[-20000:])
            shutil.rmtree(base, ignore_errors=True)
