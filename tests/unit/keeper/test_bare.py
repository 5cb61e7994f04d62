"""A bare process, as the keeper starts the converter: nothing is left to it, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche_server.engines.converter import command
from cloche_server.engines.plan import Places
from cloche_server.node.launch.prepare import ensure_system_user
from tests.unit.keeper import harness
from tests.unit.keeper.harness import FAULTS, Node, Refused, spec, wait_until

pytestmark = [pytest.mark.req("ISO-6")]

LOOKS = """#!/usr/bin/python3 -IS
import os, resource, signal, socket, sys
channel = socket.socket(fileno=0)
def say(text): channel.sendall(text.encode())
def tried(what):
    try:
        return what()
    except OSError as error:
        return error.strerror
sys.stderr.write("x" * 1000)
sys.stderr.flush()
say(repr({
    "argv": sys.argv, "env": dict(os.environ), "pid": os.getpid(), "ids": os.getresuid() + os.getresgid(), "groups": os.getgroups(),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE), "bytes": resource.getrlimit(resource.RLIMIT_FSIZE),
    "core": resource.getrlimit(resource.RLIMIT_CORE), "links": [name for _, name in socket.if_nameindex()],
    "setuid": tried(lambda: os.setresuid(0, 0, 0)), "engine": os.listdir(os.path.dirname(sys.argv[1])),
}))
while asked := channel.recv(100):
    if asked == b"fork":
        if os.fork() == 0:
            signal.pause()
        say("forked")
    if asked == b"grow":
        held = [bytearray(os.urandom(1 << 20)) for _ in range(200)]
    if asked == b"babble":
        os.set_blocking(2, False)
        written = 0
        try:
            while True: written += os.write(2, b"y" * 1000)
        except BlockingIOError:
            say(str(written))
"""


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """Its converter is a program that tells what it sees, in a directory that is closed to everybody else."""
    with tempfile.TemporaryDirectory(prefix="cloche-test-") as made:
        directory = Path(made) / "engine"
        directory.mkdir()
        program = directory / command.BINARY
        program.write_text(LOOKS)
        program.chmod(0o755)
        (directory / command.MKFS).write_text("")
        directory.chmod(0o755)
        if os.getuid() == 0:  # as in a user's home: only the node's own user gets as far as the directory
            user = ensure_system_user()
            os.chown(made, user.pw_uid, user.pw_gid)
        Path(made).chmod(0o700)
        with harness.node(more=("--converter", str(directory), "--program", str(FAULTS))) as started:
            started.ask("start_watch")
            yield started


def begun(node: Node, **fields: int) -> tuple[str, int]:
    made = node.ask("worker", **fields)
    node.known.add(made["id"])
    return made["id"], made["pid"]


def status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


def test_the_command_line() -> None:
    places = Places(engine="/mnt/e/converter", work="/mnt/w/s1", image="", empty="/mnt/n")
    plan = command.plan(spec("converter", image_file="", open_files=64, disk_bytes=5 << 20), places)
    machine = os.uname().machine
    assert plan.argv == (f"/mnt/e/converter/cloche-convert-{machine}", "/mnt/e/converter/mkfs.erofs")
    assert (plan.env, plan.files, plan.private_dirs) == ({}, {}, ())
    assert (plan.file_bytes_max, plan.open_files, plan.bare, plan.state) == (5 << 20, 256, True, None)
    assert command.control_path("s1") is None


def test_what_it_sees(node: Node) -> None:
    worker, pid = begun(node, disk_bytes=7 << 20)
    seen = eval(node.ask("worker_says", worker=worker), {})  # noqa: S307 (our own program wrote it)
    assert seen["pid"] == 1
    assert seen["ids"] == (65534,) * 6
    assert seen["groups"] == []
    assert {name for name in seen["env"] if name != "LC_CTYPE"} == set()
    assert seen["files"] == (256, 256)
    assert seen["bytes"] == (7 << 20, 7 << 20)
    assert seen["core"] == (0, 0)
    assert seen["links"] == ["lo"]
    assert seen["setuid"] == "Operation not permitted"
    assert sorted(seen["engine"]) == sorted([command.BINARY, command.MKFS])
    held = {name: os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    assert sorted(held) == ["0", "1", "2"]
    assert held["1"] == "/dev/null"
    ended = node.ask("end_worker", worker=worker)
    assert ended == {"oom_kills": 0, "said": "x" * 1000, "live": []}
    assert node.left(worker) == []


def test_nothing_is_left_to_it(node: Node) -> None:
    worker, pid = begun(node)
    node.ask("worker_says", worker=worker)
    now = status(pid)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(now[name][0], 16) == 0, name
    assert now["NoNewPrivs"] == ["1"]
    base = node.ask("facts")["id_base"]
    assert {int(number) for name in ("Uid", "Gid") for number in now[name]} <= set(range(base + 1000, base + 65536))
    others = ("self", node.pid, node.keeper_pid())
    for kind in ("user", "mnt", "net", "ipc", "uts", "pid", "cgroup"):
        here = os.readlink(f"/proc/{pid}/ns/{kind}")
        assert here not in {os.readlink(f"/proc/{other}/ns/{kind}") for other in others}, kind
    assert worker in Path(f"/proc/{pid}/cgroup").read_text()
    node.ask("end_worker", worker=worker)


def test_its_log_is_small_and_never_waits(node: Node) -> None:
    worker, _ = begun(node)
    node.ask("worker_says", worker=worker)
    node.ask("worker_hears", worker=worker, text="babble")
    assert int(node.ask("worker_says", worker=worker)) < 64 << 10
    assert len(node.ask("end_worker", worker=worker)["said"]) <= 64 << 10


def test_its_children_end_with_it(node: Node) -> None:
    worker, pid = begun(node)
    node.ask("worker_says", worker=worker)
    node.ask("worker_hears", worker=worker, text="fork")
    assert node.ask("worker_says", worker=worker) == "forked"
    os.kill(pid, signal.SIGKILL)
    node.ask("end_worker", worker=worker)
    assert node.left(worker) == []


def test_memory_is_bounded_and_counted(node: Node) -> None:
    worker, _ = begun(node, memory_bytes=32 << 20)
    node.ask("worker_says", worker=worker)
    node.ask("worker_hears", worker=worker, text="grow")
    assert node.ask("worker_says", worker=worker) == ""
    assert node.ask("end_worker", worker=worker)["oom_kills"] >= 1
    assert node.left(worker) == []


def test_a_keepers_death_is_not_noticed(node: Node) -> None:
    worker, pid = begun(node)
    node.ask("worker_says", worker=worker)
    before = node.keeper_pid()
    os.kill(before, signal.SIGKILL)

    def again() -> bool:
        try:
            return node.keeper_pid() != before and bool(node.ask("everything"))
        except Refused:
            return False

    assert wait_until(again)
    node.ask("worker_hears", worker=worker, text="fork")
    assert node.ask("worker_says", worker=worker) == "forked"
    assert status(pid)
    node.ask("end_worker", worker=worker)
    assert node.left(worker) == []
    assert wait_until(lambda: node.ask("everything") == [])


@pytest.mark.req("LIF-2")
@pytest.mark.parametrize("how", ["fail", "kill"])
@pytest.mark.parametrize("point", ["maps", "spawned", "created", "done"])
def test_a_start_that_is_cut_short_leaves_nothing(node: Node, how: str, point: str) -> None:
    def ready() -> bool:
        try:
            return node.ask("everything") == []
        except Refused:
            return False

    assert wait_until(ready)
    before = set(os.listdir("/proc"))
    fault = node.paths.state / "fault"
    fault.write_text(f"{how} keeper.boot.{point}")
    fault.chmod(0o666)
    with pytest.raises(Refused):
        node.ask("worker")
    assert not fault.exists(), "the point was never reached"
    assert wait_until(ready)
    base, count = node.ask("facts")["id_base"], node.ask("facts")["id_count"]

    def theirs() -> list[str]:
        found = []
        for name in set(os.listdir("/proc")) - before:
            try:
                if name.isdigit() and base < int(status(int(name))["Uid"][0]) < base + count:
                    found.append(Path(f"/proc/{name}/cmdline").read_text())
            except OSError:
                continue
        return [line for line in found if command.BINARY in line]

    assert wait_until(lambda: theirs() == []), theirs()
    assert list((node.paths.keeper_dir / "work").iterdir()) == []


def test_a_program_that_is_not_there() -> None:
    with tempfile.TemporaryDirectory(prefix="cloche-test-") as made:
        Path(made).chmod(0o755)
        with harness.node(more=("--converter", made)) as node:
            with pytest.raises(Refused, match="No such file") as caught:
                node.ask("worker")
            assert caught.value.code == "create_failed"
            assert node.ask("everything") == []


def test_a_daemons_death_leaves_it_to_the_next(node: Node) -> None:
    worker, pid = begun(node)
    node.ask("worker_says", worker=worker)
    node.kill_daemon()
    assert status(pid)
    node.start()
    node.ask("start_watch")
    assert [(row["id"], row["alive"]) for row in node.ask("everything")] == [(worker, True)]
    node.ask("end_by_id", sandbox=worker)
    assert node.left(worker) == []


@pytest.mark.req("IMG-1")
def test_a_removed_image_is_let_go() -> None:
    """The keeper's bind of it must not keep its bytes on the disk once nobody runs from it."""
    image = harness.IMAGES / "python.erofs"
    with harness.node() as node:
        mounts = Path(f"/proc/{node.keeper_pid()}/mountinfo")
        first, second = spec(image_file="roots/" + "a" * 64 + ".erofs"), spec()
        root = node.paths.store / first.image_file
        root.parent.mkdir(exist_ok=True)
        root.write_bytes(image.read_bytes())
        root.chmod(0o444)
        node.boot(first)
        assert f"{first.image_file} " in mounts.read_text()
        root.unlink()
        node.boot(second)
        assert f"/{root.name}" not in mounts.read_text(), "the removed image is still bound"
        assert f"/{image.name} " in mounts.read_text()
        assert [row["alive"] for row in node.ask("everything")] == [True, True]
        for one in (first, second):
            node.ask("kill", sandbox=one.id)
            assert node.left(one.id) == []
