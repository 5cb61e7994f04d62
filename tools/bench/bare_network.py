"""Bare gVisor with a network of its own: runsc's netstack on a veth pair, and no gate at all. For the egress figures.

Binary, platform and image are the product's; runsc runs as root, because it takes the pair's end over with raw sockets. It
also wipes the addresses of the namespace that it takes over, so one sandbox stays for a whole figure and each sample is a
`runsc exec` in it. What a sample measures, the client measures itself.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from cloche.wire import defaults
from cloche_engine.binaries import runsc_path
from cloche_server.engines.gvisor import command
from cloche_server.engines.plan import Places
from cloche_server.engines.spec import SandboxSpec
from cloche_server.node.launch.places import default_images_dir

IMAGE: Final = "python.erofs"
TOOLS: Final = "/.cloche/placeholder"
"""Where the product mounts an empty directory, the bare one has the client."""


def run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{argv}: {done.stdout}{done.stderr}")
    return done.stdout


class Pair:
    """A veth pair: one end here, with `host` as its address, the other in a network namespace of its own."""

    def __init__(self) -> None:
        number = os.getpid() % 250
        self.namespace = f"cloche-bench-{os.getpid()}"
        self.ours, self.theirs = f"clb{os.getpid() % 100000}a", f"clb{os.getpid() % 100000}b"
        self.host, self.guest = f"10.231.{number}.1", f"10.231.{number}.2"

    def __enter__(self) -> Self:
        run("ip", "netns", "add", self.namespace)
        run("ip", "link", "add", self.ours, "type", "veth", "peer", "name", self.theirs, "netns", self.namespace)
        run("ip", "addr", "add", f"{self.host}/30", "dev", self.ours)
        run("ip", "link", "set", self.ours, "up")
        return self

    def prepare(self) -> None:
        """Again before each sandbox."""
        inside = ("ip", "-n", self.namespace)
        run(*inside, "addr", "replace", f"{self.guest}/30", "dev", self.theirs)
        run(*inside, "link", "set", self.theirs, "up")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "route", "replace", "default", "via", self.host)

    def __exit__(self, *_: object) -> None:
        subprocess.run(["ip", "netns", "del", self.namespace], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.ours], check=False, capture_output=True)


class NetworkedSandbox:
    """One bare sandbox on such a pair; `tools` is a host directory that it sees."""

    def __init__(self, pair: Pair, tools: Path) -> None:
        if os.getuid() != 0:
            raise SystemExit("the bare engine needs root for its network: sudo just bench")
        self._pair = pair
        self._work = Path(tempfile.mkdtemp(prefix="cloche-barenet-"))
        self._name = f"net{os.getpid()}"
        places = Places(
            engine=str(runsc_path().parent),
            work=str(self._work),
            image=str(default_images_dir() / IMAGE),
            empty=str(tools),
        )
        spec = SandboxSpec(
            id=self._name,
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
        config["process"]["args"] = ["/bin/sleep", "100000"]
        config["process"]["user"] = {"uid": 0, "gid": 0}
        for namespace in config["linux"]["namespaces"]:
            if namespace["type"] == "network":
                namespace["path"] = f"/run/netns/{pair.namespace}"
        for name in ("b", *command.PRIVATE_DIRS):
            (self._work / name).mkdir()
        (self._work / "b" / "config.json").write_text(json.dumps(config))
        create = command.argv(spec, places)
        flags = create[: create.index("create")]
        self._runsc = ["--network=sandbox" if flag.startswith("--network") else flag for flag in flags]

    def __enter__(self) -> Self:
        self._pair.prepare()
        log = self._work / "log"
        argv = [*self._runsc, "run", "--detach", f"--bundle={self._work}/b", self._name]
        with log.open("wb") as output:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)
        if done.returncode:
            raise RuntimeError(f"bare network: {log.read_text()}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        run(*self._runsc, "delete", "--force", self._name)
        # runsc leaves an empty network namespace mounted in its state directory.
        subprocess.run(["umount", str(self._work / "s" / "null-netns")], check=False, capture_output=True)
        shutil.rmtree(self._work)

    def exec(self, *argv: str) -> dict[str, Any]:
        """What the client said, a JSON line."""
        said: dict[str, Any] = json.loads(run(*self._runsc, "exec", self._name, *argv))
        return said
