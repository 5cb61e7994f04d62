"""What the same machine does without us: one function for each figure, runsc with its fastest documented flags.

Binary, flags, namespaces, image, disk layer and cgroups are the product's own: `engines/gvisor/command.py` makes the
command line and config.json here as well, and only the guest's first process is another one. What a person would
prepare beforehand (directories, config.json, the cgroups and their limits) is not in the measured time.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from cloche.wire import defaults
from cloche_engine.binaries import runsc_path
from cloche_server.engines.gvisor import command
from cloche_server.engines.plan import Places
from cloche_server.engines.spec import SandboxSpec
from cloche_server.keeper.cgroups import Cgroup
from cloche_server.node.launch import cgroup as cgroups
from cloche_server.node.launch.places import default_images_dir
from cloche_server.node.launch.up import up
from tests.promises.nodes import RealNode
from tools.bench.lean import Connection

PROCESS: Final = Path(__file__).with_name("bare_process.py")
DROPPING: Final = Path(__file__).with_name("dropping_daemon.py")
FIRST_HOST_ID: Final = 1_900_000_000
"""Far from every range that a node takes."""
IMAGE: Final = "python.erofs"


class Bare:
    """A lean process that runs runsc, and one parent cgroup for all that it starts."""

    def __init__(self) -> None:
        if os.getuid() != 0:
            raise SystemExit("the bare engine needs root for its two ids and cgroups: sudo just bench")
        self._base = Path(tempfile.mkdtemp(prefix="cloche-bare-"))
        self._base.chmod(0o711)
        (self._base / "empty").mkdir(mode=0o755)
        self._name = self._base.name
        mounts = cgroups.v1_mounts() if cgroups.version() == 1 else {"unified": cgroups.ROOT}
        self._parent = Cgroup(cgroups.version(), {name: str(path / self._name) for name, path in mounts.items()})
        for path in self._parent.dirs.values():
            os.mkdir(path)
        if self._parent.version == 2:
            (Path(self._parent.main) / "cgroup.subtree_control").write_text("+memory +pids +cpu")
        argv = [sys.executable, "-I", "-S", str(PROCESS)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._made = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        self._parent.remove()
        shutil.rmtree(self._base)

    def tell(self, **fields: Any) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(fields) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def sandbox(self, *args: str) -> "BareSandbox":
        """Prepared and not started; `args` is its first process."""
        self._made += 1
        name = f"sl{self._made:016}"
        return BareSandbox(self, name, self._base, self._parent.child(name), FIRST_HOST_ID + 2 * self._made, args)


class BareSandbox:
    """One sandbox of runsc's own making: `run` starts it, leaving the block ends it."""

    def __init__(self, bare: Bare, name: str, base: Path, cgroup: Cgroup, host_id: int, args: tuple[str, ...]) -> None:
        self._bare = bare
        self._name = name
        self._work = base / name
        self._cgroup = cgroup
        self._host_id = host_id
        places = Places(
            engine=str(runsc_path().parent),
            work=str(self._work),
            image=str(default_images_dir() / IMAGE),
            empty=str(base / "empty"),
        )
        spec = SandboxSpec(
            id=name,
            tenant="bench",
            owner="bench",
            lineage="bench",
            engine="gvisor",
            image_file=IMAGE,
            cpus=defaults.CPUS,
            memory_bytes=defaults.MEMORY_BYTES,
            processes=defaults.PROCESSES,
            disk_bytes=defaults.DISK_BYTES,
            open_files=defaults.OPEN_FILES,
        )
        config = command.config(spec, places)
        config["process"]["args"] = list(args)
        create = command.argv(spec, places)
        self._flags = create[: create.index("create")]
        self._prepare(spec, config)

    def _prepare(self, spec: SandboxSpec, config: dict[str, Any]) -> None:
        self._cgroup.make(spec)
        (self._work / "b").mkdir(parents=True)
        (self._work / "b" / "config.json").write_text(json.dumps(config))
        (self._work / command.MEMINFO).write_bytes(command.meminfo(spec))
        for name in command.PRIVATE_DIRS:
            path = self._work / name
            path.mkdir(mode=0o700)
            os.chown(path, self._host_id, self._host_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bare.tell(kill=list(self.pids()))
        shutil.rmtree(self._work)
        while not self._cgroup.remove():
            pass

    def pids(self) -> tuple[int, ...]:
        state = self._work / "s" / f"{self._name}_sandbox:{self._name}.state"
        return command.engine_pids(state.read_bytes()) if state.exists() else ()

    def run(self, *, until: str) -> float:
        """`runsc run --detach`: seconds until its first process says something, or until the command has returned."""
        return self._runsc("run", "--detach", f"--bundle={self._work}/b", self._name, until=until)

    def exec(self, *args: str) -> float:
        """`runsc exec`, from the sandbox's own namespaces, to its end."""
        return self._runsc("exec", self._name, *args, until="exit", join=self.pids()[0])

    def _runsc(self, *args: str, until: str, **more: int) -> float:
        file = "tasks" if self._cgroup.version == 1 else "cgroup.procs"
        entered = [f"{path}/{file}" for path in self._cgroup.dirs.values()]
        argv = [*self._flags, *args]
        meminfo = str(self._work / command.MEMINFO)
        answer = self._bare.tell(
            argv=argv, cgroups=entered, meminfo=meminfo, host_id=self._host_id, until=until, **more
        )
        if answer["status"] != 0 or (until == "output" and answer["said"] != "42\n"):
            raise RuntimeError(f"bare {args}: {answer}")
        return float(answer["s"])


def cold_create(bare: Bare) -> float:
    """Seconds from the fork of `runsc run --detach` to the first byte of `echo` in a pipe."""
    with bare.sandbox("/bin/echo", "42") as sandbox:
        return sandbox.run(until="output")


def exec_round_trip(sandbox: BareSandbox) -> float:
    """Seconds of `runsc exec ID /bin/true`."""
    return sandbox.exec("/bin/true")


class DroppingNode(RealNode):
    """A node whose daemon drops every byte of output as it leaves the channel."""

    def start(self) -> None:
        script = self.base / DROPPING.name
        shutil.copyfile(DROPPING, script)  # the daemon is another user, who may not see this checkout
        script.chmod(0o644)
        self.pid = up(self.paths, mode=self.mode, program=(str(script),))
        assert self.pid, "a daemon was there already"
        self.starts += 1


@contextlib.contextmanager
def dropping_node() -> Iterator[DroppingNode]:
    with tempfile.TemporaryDirectory(prefix="cloche-drop-") as base:
        os.chmod(base, 0o755)
        node = DroppingNode(Path(base))
        node.start()
        try:
            yield node
        finally:
            node.stop()


def output_dropped(connection: Connection, sandbox: str, writer: dict[str, Any]) -> float:
    """Seconds until a command has ended whose output went through the channel and no further."""
    began = time.perf_counter()
    made = connection.ask("POST", f"/v1/sandboxes/{sandbox}/commands", writer)
    ended = connection.ask("GET", f"/v1/sandboxes/{sandbox}/commands/{made['id']}?wait_s=300")
    seconds = time.perf_counter() - began
    assert ended["ended"]["exit_code"] == 0, ended
    return seconds
