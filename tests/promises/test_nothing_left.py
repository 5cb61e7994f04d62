"""After a sandbox nothing of it is there: when it was killed, when its making failed at any step, when the daemon died meanwhile."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche.client import Node, Sandbox
from cloche.wire.errors import ClocheError
from cloche_server.node.launch.cgroup import v1_mounts
from cloche_server.node.launch.cgroup import version as cgroup_version
from tests.promises.failures import DAEMON_POINTS, KEEPER_POINTS, TEARDOWN_POINTS, FailingNode, failing_node
from tests.promises.nodes import CLI, wait_until
from tests.promises.plants import guest_processes
from tests.promises.traces import Traces, traces

FULL_TIMEOUT_S = 3600
SMALL: dict[str, Any] = {"memory_mb": 64, "disk_mb": 64, "retain_s": 0}


@pytest.fixture(scope="module")
def failing() -> Iterator[FailingNode]:
    with failing_node() as node:
        one_cycle(node)  # what the first sandbox opens for good is there before anything is counted
        yield node


@pytest.fixture
def before(failing: FailingNode) -> Traces:
    return traces(failing)


def one_cycle(node: FailingNode) -> None:
    with node.sandbox(**SMALL) as box:
        assert box.run(["echo", "here"]).stdout == "here\n"


def left(node: FailingNode, before: Traces) -> dict[str, object]:
    """Everything that is more than before; also what a sandbox's records would be, which traces() leaves out."""
    found = traces(node).more_than(before)
    records = sorted(path.name for path in (node.paths.state / "sandboxes").glob("*"))
    work = sorted(path.name for path in node.paths.keeper_dir.glob("*/*") if path.name.startswith("s"))
    if node.mode == "machine" and (processes := guest_processes(node)):
        found["guest processes"] = sorted(processes)
    return {**found, **({"records": records} if records else {}), **({"keeper's": work} if work else {})}


def expect_nothing_left(node: FailingNode, before: Traces, what: str) -> None:
    last: list[dict[str, object]] = []

    def is_clean() -> bool:
        last[:] = [left(node, before)]
        return last[0] == {}

    try:
        wait_until(is_clean, 30)
    except AssertionError:
        raise AssertionError(f"{what} left {last[0]}\n{node.log()[-3000:]}") from None


def create(node: Node) -> Sandbox:
    return Sandbox.create(node=node, memory_mb=64, disk_mb=64, retain_s=0)


# ---------------------------------------------------------------- a step that fails


@pytest.mark.req("LIF-2")
@pytest.mark.parametrize("point", [*DAEMON_POINTS, *KEEPER_POINTS])
def test_a_failed_step_of_set_up_leaves_nothing_and_has_a_name(
    failing: FailingNode, before: Traces, point: str
) -> None:
    failing.set_fault("fail", point)
    with failing.client() as client, pytest.raises(ClocheError) as failed:
        create(client)
    assert failing.was_struck(), f"{point} was never passed"
    assert failed.value.code in ("create_failed", "keeper_failed"), failed.value
    expect_nothing_left(failing, before, f"a failure at {point}")
    one_cycle(failing)


@pytest.mark.req("LIF-2")
@pytest.mark.parametrize("point", TEARDOWN_POINTS)
def test_a_failed_step_of_teardown_is_tried_again(failing: FailingNode, before: Traces, point: str) -> None:
    with failing.client() as client:
        box = create(client)
        failing.set_fault("fail", point)
        box.kill()
    assert failing.was_struck(), f"{point} was never passed"
    expect_nothing_left(failing, before, f"a failure at {point}")
    one_cycle(failing)


@pytest.mark.req("LIF-2")
@pytest.mark.timeout(FULL_TIMEOUT_S)
def test_a_keeper_that_dies_at_a_step_leaves_nothing(
    failing: FailingNode, before: Traces, seed: int, long_run: bool
) -> None:
    points = [*KEEPER_POINTS, *TEARDOWN_POINTS]
    for point in points if long_run else ["keeper.boot.done", *random.Random(seed).sample(points, 2)]:
        print(f"the keeper dies at {point}")
        with failing.client() as client:
            failing.set_fault("kill", point)
            told = "killed"
            try:
                create(client).kill()
            except ClocheError as refused:
                told = refused.code
            assert told in ("killed", "create_failed", "keeper_failed"), point
        assert failing.was_struck(), f"{point} was never passed"
        wait_until(lambda: _works(failing), 30, "a successor's first sandbox")
        expect_nothing_left(failing, before, f"a keeper's death at {point}")


def _works(node: FailingNode) -> bool:
    try:
        one_cycle(node)
    except ClocheError:
        return False
    return True


# ---------------------------------------------------------------- a daemon that dies


def create_and_lose(node: FailingNode, strike: Callable[[], None]) -> str:
    """A create during which the daemon dies. What the caller was told."""
    told: list[str] = []

    def attempt() -> None:
        try:
            with node.client(request_timeout_s=60) as client:
                create(client)
            told.append("created")
        except ClocheError as failed:
            told.append(failed.code)

    caller = threading.Thread(target=attempt)
    caller.start()
    strike()
    node.await_death()
    caller.join(90)
    assert told
    node.start()
    return told[0]


def kill_at_random(node: FailingNode, chance: random.Random) -> Callable[[], None]:
    def strike() -> None:
        until = time.monotonic() + chance.uniform(0.0, 0.5)
        wait_until(lambda: time.monotonic() >= until)
        os.kill(node.pid, signal.SIGKILL)

    return strike


@pytest.mark.req("LIF-2")
@pytest.mark.req("ISO-3")
@pytest.mark.timeout(FULL_TIMEOUT_S)
def test_cycles_with_the_daemon_killed_during_set_up(
    failing: FailingNode, before: Traces, seed: int, long_run: bool
) -> None:
    chance, started = random.Random(seed), time.monotonic()
    cycles, kills = (500, 100) if long_run else (30, 6)
    points = [*DAEMON_POINTS, *KEEPER_POINTS, "random"]
    plan = [points[n % len(points)] for n in range(kills)] if long_run else chance.sample(points, kills)
    plan += ["none"] * (cycles - kills)
    chance.shuffle(plan)
    answers: dict[str, int] = {}
    for number, point in enumerate(plan):
        if point == "none":
            one_cycle(failing)
            continue
        if point == "random":
            said = create_and_lose(failing, kill_at_random(failing, chance))
        else:
            failing.set_fault("kill-daemon" if point in KEEPER_POINTS else "kill", point)
            said = create_and_lose(failing, lambda: None)
            assert failing.was_struck(), point
        answers[said] = answers.get(said, 0) + 1
        if said == "created":
            with failing.client() as client:
                client.kill_all()
        if not long_run or number % 25 == 0:
            expect_nothing_left(failing, before, f"cycle {number}, the daemon killed at {point},")
    expect_nothing_left(failing, before, f"{cycles} cycles")
    one_cycle(failing)
    print(
        f"\n{cycles} create / kill cycles, {kills} with the daemon killed during set-up (seed {seed}): nothing left; "
        f"callers were told {answers}; {time.monotonic() - started:.0f} s"
    )


@pytest.mark.req("LIF-2")
@pytest.mark.req("LIF-6")
def test_a_daemon_that_fails_in_its_start_leaves_no_keeper_but_every_sandbox() -> None:
    with failing_node() as node:
        with node.client() as client:
            box = create(client)
        fail_in_start(node)
        keeper = keeper_of(node)  # it holds a sandbox
        node.start()
        with node.client() as client:
            assert client.info().keeper_pid == keeper
            again = client.connect(box.id)
            assert again.run(["echo", "still"]).stdout == "still\n"
            again.kill()
        fail_in_start(node)
        wait_until(lambda: not is_there(keeper), what="the end of a keeper that holds nothing")
        node.start()
        one_cycle(node)


def fail_in_start(node: FailingNode) -> None:
    node.kill_daemon()
    node.set_fault("fail", "node.start.after_journal")
    with pytest.raises(ClocheError) as failed:
        node.start()
    assert failed.value.code == "node_unavailable"
    assert node.was_struck()


def keeper_of(node: FailingNode) -> int:
    """The process that listens on the keeper's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(str(node.paths.keeper_socket))
        return int(struct.unpack("iII", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


# ---------------------------------------------------------------- the end of everything


RESET_SCRIPT = """
set -eu
etc=$1 cloche=$2 ours=$3
mount --make-rprivate /
for controller in memory pids cpu cpuacct; do
    if [ -d /sys/fs/cgroup/$controller/$ours ]; then
        mount --bind /sys/fs/cgroup/$controller/$ours /sys/fs/cgroup/$controller
    fi
done
cp -a /etc "$etc/etc" && mount --bind "$etc/etc" /etc
mount -t tmpfs none /var/lib && mount -t tmpfs none /run
sed -i '/^cloche:/d' /etc/passwd /etc/group /etc/shadow /etc/gshadow
export HOME="$etc/home" CLOCHE_URL= XDG_STATE_HOME= XDG_RUNTIME_DIR=
unset CLOCHE_URL XDG_STATE_HOME XDG_RUNTIME_DIR
mkdir "$HOME"
everything() {
    find /var/lib /run "$HOME" | sort
    cut -d: -f1 /etc/passwd | sort
    find /sys/fs/cgroup/memory /sys/fs/cgroup/pids /sys/fs/cgroup/cpu -mindepth 1 -type d | sort
    for stat in /proc/[0-9]*/comm; do cat "$stat" 2>/dev/null || true; done | grep -v '^\\(bash\\|find\\|sort\\|cut\\|cat\\|grep\\)$' || true
}
everything > "$etc/before"
"$cloche" up > "$etc/up" 2>&1
"$cloche" run -- echo 42 > "$etc/run"
"$cloche" create > "$etc/id"
everything > "$etc/during"
"$cloche" reset --all --yes > "$etc/reset" 2>&1
everything > "$etc/after"
"$cloche" reset --all --yes > "$etc/again" 2>&1
"""


@pytest.mark.req("LIF-2")
@pytest.mark.skipif(
    os.getuid() != 0 or cgroup_version() != 1, reason="needs root, to hide the machine's own node behind mounts"
)
def test_reset_leaves_nothing_but_the_packages(tmp_path: Path) -> None:
    """The machine's node, at its usual places, in mount, pid and cgroup branches of the test's own."""
    ours = f"cloche-reset-{os.getpid()}"
    branches = [path / ours for path in v1_mounts().values()]
    for path in branches:
        path.mkdir()
    try:
        argv = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "bash", "-c", RESET_SCRIPT]
        argv += ["reset", str(tmp_path), str(CLI), ours]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=110, check=False)
        texts = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
        assert done.returncode == 0, f"{done.stderr}\n{texts}"
    finally:
        for path in branches:
            for inner in sorted(path.rglob("*"), key=lambda each: -len(each.parts)):
                if inner.is_dir():
                    inner.rmdir()
            path.rmdir()
    assert texts["run"] == "42\n"
    for made in ("/var/lib/cloche", "/run/cloche/api.sock", "/sys/fs/cgroup/memory/cloche", "cloche", "runsc"):
        assert made in texts["during"], made
    assert texts["after"].splitlines() == texts["before"].splitlines(), texts["reset"]
    assert "there was nothing" in texts["again"]
    print(f"\nreset --all: {texts['reset'].strip()}")
