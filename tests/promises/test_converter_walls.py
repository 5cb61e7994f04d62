"""The walls around the process that reads hostile archives, read from the host's /proc while a conversion runs."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import cloche_engine
from cloche_server.node.launch.up import up
from tests.promises.nodes import RealNode, wait_until
from tests.promises.traces import traces
from tests.unit.keeper import harness
from tests.unit.keeper.harness import Node, Refused, spec

BINARY = f"cloche-convert-{platform.machine()}"
NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")
CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
WORKER_DESCRIPTORS = {r"/dev/null": 1, r"socket:\[\d+\]": 2, r"pipe:\[\d+\]": 2, r"/.* \(deleted\)": 3}
"""Its channel and its log; the layer and mkfs' input; the output, the scratch file and the agent."""
MKFS_DESCRIPTORS = {r"/dev/null": 1, r"socket:\[\d+\]": 1, r"pipe:\[\d+\]": 2, r"/.* \(deleted\)": 2}
"""Its log; its input, and the output that it opened again."""

pytestmark = [
    pytest.mark.req("ISO-6"),
    pytest.mark.req("IMG-2"),
    pytest.mark.skipif(
        not Path(cloche_engine.__file__).with_name("bin").joinpath(BINARY).is_file(),
        reason="the converter was not built here",
    ),
]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with harness.node() as made:
        yield made


def status(pid: int | str) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def program(pid: int) -> str:
    return os.path.basename(Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0])


def family(pid: int) -> list[int]:
    """The worker and mkfs, once both are behind their filters."""
    wait_until(lambda: len(children(pid)) == 1 and program(children(pid)[0]) == "mkfs.erofs", what="mkfs")
    wait_until(lambda: status(pid)["Seccomp"] == ["2"], what="the worker's filter")
    return [pid, *children(pid)]


@contextmanager
def converting(node: Node) -> Iterator[tuple[str, list[int]]]:
    made = node.ask("convert")
    node.known.add(made["id"])
    try:
        yield made["id"], family(made["pid"])
    finally:
        with pytest.raises(Refused) as caught:
            node.ask("end_conversion", cancel=False)
        assert caught.value.code == "image_corrupt", "the layer ended too early"
    assert node.left(made["id"]) == []
    assert node.ask("everything") == []


@pytest.mark.req("ISO-4")
def test_another_uid_and_nothing_to_do_with_it(node: Node) -> None:
    wanted = spec()
    sandbox = node.boot(wanted)
    with converting(node) as (_, pids):
        uids = set()
        for pid in pids:
            now = status(pid)
            uids |= {int(number) for name in ("Uid", "Gid") for number in now[name]}
            assert now["Groups"] == []
            assert {int(now[name][0], 16) for name in CAPABILITY_SETS} == {0}
            assert now["NoNewPrivs"] == ["1"]
            assert now["Seccomp"] == ["2"]
        assert len(uids) == 1
        others = {int(status(pid)["Uid"][0]) for pid in (node.pid, node.keeper_pid(), sandbox["pid"], os.getpid())}
        assert not uids & {0, *others, sandbox["host_uid"]}
        node.ask("kill", sandbox=wanted.id)


@pytest.mark.req("ISO-4")
def test_namespaces_and_a_cgroup_of_its_own(node: Node) -> None:
    with converting(node) as (worker, pids):
        for kind in NAMESPACES:
            found = {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in pids}
            others = {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in ("self", node.pid, node.keeper_pid())}
            assert len(found) == 1, kind
            assert not found & others, kind
        for pid in pids:
            assert Path(f"/proc/{pid}/net/dev").read_text().count(":") == 1, "more than a loopback"
            assert all(
                line.endswith(f"/{worker}")
                for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()
                if re.search(r":(memory|pids|cpu|cpu,cpuacct|):", line) and line != "0::/"
            )
            limits = Path(f"/proc/{pid}/limits").read_text()
            assert re.search(r"Max core file size +0 +0", limits)
            assert re.search(r"Max open files +256 +256", limits)
            assert re.search(r"Max file size +\d+ +\d+", limits)


def test_it_holds_what_the_job_needs(node: Node) -> None:
    with converting(node) as (_, (worker, mkfs)):
        for pid, allowed in ((worker, WORKER_DESCRIPTORS), (mkfs, MKFS_DESCRIPTORS)):
            held = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
            for kind, most in allowed.items():
                assert sum(bool(re.fullmatch(kind, each)) for each in held) <= most, held
            assert [each for each in held if not any(re.fullmatch(kind, each) for kind in allowed)] == []


def test_a_cancelled_conversion_leaves_nothing(node: Node) -> None:
    made = node.ask("convert")
    node.known.add(made["id"])
    pids = family(made["pid"])
    assert node.ask("end_conversion", cancel=True) == "cancelled"
    assert node.left(made["id"]) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


# ------------------------------------------------------------------------ kill -9 of the daemon


class ConvertingNode(RealNode):
    """The product's daemon, which begins an endless conversion when it is ready and the file `convert` is there."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.plant = base / "plant"
        self.plant.mkdir()
        self.plant.chmod(0o777)
        here = Path(__file__).parent / "evil"
        shutil.copyfile(here / "converting_daemon.py", self.plant / "converting_daemon.py")

    def start(self) -> None:
        program = (str(self.plant / "converting_daemon.py"), str(self.plant))
        self.pid = up(self.paths, mode=self.mode, program=program)
        self.starts += 1

    def worker(self) -> tuple[str, int]:
        wait_until((self.plant / "worker").exists, what="a conversion")
        name, pid = (self.plant / "worker").read_text().split()
        (self.plant / "worker").unlink()
        return name, int(pid)


@pytest.mark.req("LIF-6")
@pytest.mark.req("IMG-1")
def test_a_daemon_killed_meanwhile_leaves_nothing_to_the_next(long_run: bool) -> None:
    base = Path(tempfile.mkdtemp(prefix="cloche-promise-"))
    base.chmod(0o755)
    node = ConvertingNode(base)
    try:
        node.start()
        before = traces(node)
        for _ in range(10 if long_run else 1):
            (node.plant / "convert").touch()
            node.restart_daemon()
            worker, pid = node.worker()
            pids = family(pid)
            (node.plant / "convert").unlink()
            node.kill_daemon()
            assert program(pid) == BINARY, "it outlives the daemon, until the next one ends it"
            node.start()
            wait_until(lambda pids=pids: not any(Path(f"/proc/{each}").exists() for each in pids), what="its end")
            found = traces(node).more_than(before)
            assert {name for name in found if name != "daemon_descriptors"} == set(), found
            assert [path for path in harness._cgroup_dirs() if path.name == worker] == []
    finally:
        try:
            node.stop()
        finally:
            shutil.rmtree(base, ignore_errors=True)
