"""A real node whose daemon can be made to die at a named point, to see its clocks jump, or to be in more of a hurry."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from cloche.errors import ClocheError
from cloche_server.node.launch.ids import recorded_range
from cloche_server.node.launch.up import up
from tests.promises.nodes import RealNode, wait_until

SCRIPT = Path(__file__).with_name("planted_daemon.py")
POINTS_WHILE_IT_RUNS = (
    "node.log.after_write",
    "node.command.after_record",
    "node.command.before_open",
    "node.command.before_confirm",
    "channel.frame.out",
    "channel.frame.in",
)
POINTS_WHILE_IT_STARTS = ("node.adopt.before_reset", "node.adopt.during_reset")


class PlantedNode(RealNode):
    """Its daemon is `planted_daemon.py`. Without a fault, a jump or a constant it behaves as any other."""

    def __init__(self, base: Path, *, images: Path | None = None, constants: Mapping[str, float] | None = None) -> None:
        super().__init__(base, images=images)
        self.plant = base / "plant"
        self.plant.mkdir()
        self.plant.chmod(0o777)  # the daemon is another user, and renames its fault
        shutil.copyfile(SCRIPT, self.plant / SCRIPT.name)
        self._write("constants.json", json.dumps(dict(constants or {})))

    def start(self) -> None:
        self.pid = up(self.paths, mode=self.mode, program=(str(self.plant / SCRIPT.name), str(self.plant)))
        assert self.pid, "a daemon was there already"
        self.starts += 1

    def jump(self, *, boot_s: float = 0.0, wall_s: float = 0.0) -> None:
        """The machine slept for so long, or somebody set its clock: in all, not since the last jump."""
        self._write("clock.json", json.dumps({"boot_s": boot_s, "wall_s": wall_s}))

    def die_at(self, point: str, passing: int = 1) -> None:
        """From now on: the daemon kills itself at its next passing of that point, or a later one."""
        (self.plant / "taken").unlink(missing_ok=True)
        self._write("fault", f"{point} {passing}")

    def wait_struck(self, seconds: float = 60.0) -> None:
        """Until the daemon has died of its fault."""
        status: list[int] = []

        def is_dead() -> bool:
            found, how = os.waitpid(self.pid, os.WNOHANG)
            status.extend([how] if found else [])
            return bool(status)

        wait_until(is_dead, seconds, "the daemon to reach its fault")
        assert os.WTERMSIG(status[0]) == signal.SIGKILL
        assert (self.plant / "taken").exists(), f"it died of something else:\n{self.log()[-3000:]}"

    def start_and_die_at(self, point: str, passing: int = 1) -> None:
        """A daemon that dies while it adopts; the next one starts as always."""
        self.die_at(point, passing)
        with pytest.raises(ClocheError) as failed:
            self.start()
        assert failed.value.code == "node_unavailable"
        assert (self.plant / "taken").exists(), f"it died of something else: {failed.value}"

    def replace_keeper(self) -> None:
        """As an upgrade would: the old one is asked to go and its successor gets everything."""
        old = self.keeper_pid()
        os.kill(self.pid, signal.SIGUSR2)
        wait_until(lambda: self.keeper_pid() != old, what="a successor")

    def _write(self, name: str, text: str) -> None:
        new = self.plant / f"{name}.new"
        new.write_text(text)
        new.chmod(0o644)
        new.rename(self.plant / name)


@contextmanager
def planted_node(*, images: Path | None = None, constants: Mapping[str, float] | None = None) -> Iterator[PlantedNode]:
    base = Path(tempfile.mkdtemp(prefix="cloche-planted-"))
    base.chmod(0o755)
    node = PlantedNode(base, images=images, constants=constants)
    try:
        node.start()
        yield node
    finally:
        (node.plant / "fault").unlink(missing_ok=True)
        try:
            node.stop()
        finally:
            if "Traceback" in node.log():
                sys.stderr.write(node.log()[-20000:])
            shutil.rmtree(base, ignore_errors=True)


def sentry_pid(node: RealNode, sandbox: str) -> int:
    """The engine's process, as the journal names it."""
    with node.client() as client:
        for event in client.events(sandbox, limit=1000).events:
            if event.kind == "sandbox.running":
                return int(event.detail["pid"])
    raise AssertionError(f"{sandbox} never ran")


def guest_processes(node: RealNode) -> set[int]:
    """Every process on this host that has an id of this node's range: sentries, helpers and guests, orphans too."""
    ids = recorded_range(node.paths.range_file)
    assert ids is not None, "only a machine's node records its range"
    found = set()
    for name in os.listdir("/proc"):
        try:
            uid = os.stat(f"/proc/{name}").st_uid if name.isdigit() else -1
        except FileNotFoundError:
            continue
        if ids.first <= uid < ids.first + ids.count:
            found.add(int(name))
    return found
