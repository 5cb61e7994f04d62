"""Create, find, extend, sleep, end; and the limits of a sandbox, which are not its neighbours'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from cloche.client import Sandbox
from cloche.errors import ClocheError
from cloche.wire.sandboxes import CreateSandbox, Limits
from tests.promises.nodes import RealNode, wait_until
from tests.promises.plants import PlantedNode, planted_node
from tests.promises.raw_api import ask

T = TypeVar("T")
MIB = 1024 * 1024
HOUR_S = 3600.0
SLACK_S = 20.0
"""What a busy machine may take between two looks at a clock."""


def all_at_once(count: int, act: Callable[[], T]) -> list[T]:
    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(act) for _ in range(count)]]


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(ClocheError) as refused:
        act()
    return refused.value.code


# ---------------------------------------------------------------------------------------- by key


@pytest.mark.req("LIF-1")
@pytest.mark.req("LIF-6")
def test_a_create_with_a_key_makes_one_sandbox(own_node: RealNode) -> None:
    request = CreateSandbox(labels={"n": "1"}, limits=Limits(memory_bytes=64 * MIB))
    other = request.model_copy(update={"labels": {"n": "2"}})

    def create() -> str:
        with own_node.client() as client:
            return client.create(request, key="once").id

    with own_node.client() as client:
        ids = set(all_at_once(8, create))
        assert len(ids) == 1
        assert {box.id for box in client.list()} == ids
        assert refusal(lambda: client.create(other, key="once")) == "idempotency_conflict"
        status, said = ask(own_node, "POST", "/v1/sandboxes", key="once", body={"labels": {"n": "3"}})
        assert (status, said["code"]) == (409, "idempotency_conflict")
        own_node.restart_daemon()
        assert {create()} == ids, "also by the next daemon"
        Sandbox.connect(ids.copy().pop(), node=client).kill()
        assert {create()} == ids, "also when it is over"
        assert client.list() == []
        assert client.create(request, key="twice").id not in ids


@pytest.mark.req("LIF-1")
@pytest.mark.req("EXE-4")
def test_a_command_with_a_key_runs_once(own_node: RealNode) -> None:
    argv = ["sh", "-c", "echo ran >>/workspace/ran; echo done"]
    with own_node.sandbox(memory_mb=64) as box:

        def start() -> str:
            with own_node.client() as client:
                return Sandbox.connect(box.id, node=client).commands.start(argv, key="once").id

        ids = set(all_at_once(8, start))
        assert len(ids) == 1
        assert refusal(lambda: box.commands.start(["true"], key="once")) == "idempotency_conflict"
        assert box.commands.get(*ids).result().stdout == "done\n"
        own_node.restart_daemon()
        assert {start()} == ids
        assert box.commands.get(*ids).result().stdout == "done\n"
        assert box.files.read("/workspace/ran") == b"ran\n"
        assert refusal(lambda: box.commands.start(["true"], key="once")) == "idempotency_conflict"


# --------------------------------------------------------------------------------- finding, extending


@pytest.mark.req("LIF-1")
def test_a_sandbox_is_found_by_id_prefix_and_name(node: RealNode) -> None:
    with node.sandbox(name="first-one", memory_mb=64) as box, node.sandbox(memory_mb=64), node.client() as client:
        for text in (box.id, box.id[:12], "first-one"):
            assert Sandbox.connect(text, node=client).id == box.id
        assert refusal(lambda: Sandbox.connect("sloc", node=client)) == "ambiguous"
        assert refusal(lambda: Sandbox.connect("nobody", node=client)) == "not_found"
        assert refusal(lambda: Sandbox.create(name="first-one", node=client)) == "name_taken"
        assert {"first-one"} == {each.view.name for each in client.list() if each.view.name}
        with Sandbox.connect("first-one", node=client):
            pass  # whoever only connected does not end it
        assert box.info().ended is None
        box.kill()
        assert Sandbox.connect("first-one", node=client).ended is not None
        assert box.id in [each.id for each in client.list(include_ended=True)]
        assert box.id not in [each.id for each in client.list()]


def left_s(box: Sandbox) -> float:
    left = box.info().ends_in_s
    assert left is not None
    return left


@pytest.mark.req("LIF-1")
def test_extending_and_connecting_never_shorten(node: RealNode) -> None:
    with node.sandbox(ttl_s=600, memory_mb=64) as box, node.client() as client:
        box.extend(5)
        assert 600 - SLACK_S < left_s(box) <= 600
        Sandbox.connect(box.id, node=client).close()
        assert 600 - SLACK_S < left_s(box) <= 600
        box.extend(900)
        assert 900 - SLACK_S < left_s(box) <= 900
        done = node.cloche("exec", box.id, "--", "true")
        assert done.returncode == 0
        assert 900 - SLACK_S < left_s(box) <= 900
        status, said = ask(node, "POST", f"/v1/sandboxes/{box.id}/extend", body={"ttl_s": 86401})
        assert (status, said["code"]) == (400, "invalid_request")
        box.kill()
        assert refusal(lambda: box.extend(900)) == "sandbox_ended"


# ---------------------------------------------------------------------------------------- clocks


class Sleeper:
    """A machine that sleeps: its boot clock jumps, in all by the sum."""

    def __init__(self, node: PlantedNode) -> None:
        self.node = node
        self._slept_s = 0.0

    def sleep(self, seconds: float) -> None:
        self._slept_s += seconds
        self.node.jump(boot_s=self._slept_s)

    def set_wall(self, wall_s: float) -> None:
        self.node.jump(boot_s=self._slept_s, wall_s=wall_s)


@pytest.fixture(scope="module")
def sleeper() -> Iterator[Sleeper]:
    with planted_node() as node:
        yield Sleeper(node)


def end_of(box: Sandbox) -> tuple[str, str | None]:
    end = box.wait(20).ended
    assert end is not None
    return end.reason.value, end.by


@pytest.mark.req("LIF-1")
@pytest.mark.req("RES-2")
def test_a_sleeping_laptop_does_not_stop_the_times(sleeper: Sleeper) -> None:
    with (
        sleeper.node.sandbox(ttl_s=HOUR_S, memory_mb=64) as short,
        sleeper.node.sandbox(ttl_s=4 * HOUR_S, memory_mb=64) as long,
        sleeper.node.sandbox(ttl_s=4 * HOUR_S, idle_timeout_s=HOUR_S, memory_mb=64) as idle,
    ):
        limited = long.commands.start(["sleep", "100000"], timeout_s=HOUR_S)
        unlimited = long.commands.start(["sleep", "100000"])
        sleeper.sleep(HOUR_S / 2)
        assert HOUR_S / 2 - SLACK_S < left_s(short) <= HOUR_S / 2
        assert limited.info().ended is None
        sleeper.sleep(HOUR_S / 2 + 1)
        assert end_of(short) == ("timed_out", "ttl")
        assert end_of(idle) == ("timed_out", "idle")
        end = limited.wait(20)
        assert (end.reason, end.by) == ("timed_out", "timeout")
        assert unlimited.info().ended is None
        assert 3 * HOUR_S - SLACK_S < left_s(long) < 3 * HOUR_S
        assert long.info().age_s > HOUR_S


@pytest.mark.req("LIF-1")
def test_setting_the_wall_clock_changes_no_time(sleeper: Sleeper) -> None:
    with sleeper.node.sandbox(ttl_s=HOUR_S, idle_timeout_s=HOUR_S, memory_mb=64) as box:
        command = box.commands.start(["sleep", "100000"], timeout_s=HOUR_S)
        for wall_s in (-48 * HOUR_S, 48 * HOUR_S, 0.0):
            sleeper.set_wall(wall_s)
            assert HOUR_S - SLACK_S < left_s(box) <= HOUR_S
            assert box.info().age_s < SLACK_S
            assert box.run(["echo", "on"]).stdout == "on\n"
            assert command.info().ended is None
        sleeper.set_wall(48 * HOUR_S)
        sleeper.node.restart_daemon()
        assert HOUR_S - 2 * SLACK_S < left_s(box) <= HOUR_S, "also for the next daemon"
        assert command.info().ended is None
        sleeper.set_wall(0.0)


@pytest.mark.req("LIF-1")
@pytest.mark.req("LIF-6")
def test_a_time_that_passed_without_a_daemon_counts(sleeper: Sleeper) -> None:
    with sleeper.node.sandbox(ttl_s=HOUR_S, memory_mb=64) as box, sleeper.node.sandbox(memory_mb=64) as other:
        other.extend(3 * HOUR_S)
        limited = other.commands.start(["sleep", "100000"], timeout_s=HOUR_S)
        sleeper.node.kill_daemon()
        sleeper.sleep(HOUR_S + 1)
        sleeper.node.start()
        assert end_of(box) == ("timed_out", "ttl")
        assert limited.wait(20).reason == "timed_out"
        assert 2 * HOUR_S - 2 * SLACK_S < left_s(other) < 2 * HOUR_S, "what was extended stays so"


@pytest.mark.req("LIF-1")
def test_nothing_lives_longer_than_the_maximum(sleeper: Sleeper) -> None:
    with sleeper.node.sandbox(ttl_s=24 * HOUR_S, memory_mb=64) as box:
        sleeper.sleep(23 * HOUR_S)
        assert HOUR_S - SLACK_S < left_s(box) <= HOUR_S
        box.extend(24 * HOUR_S)
        assert HOUR_S - SLACK_S < left_s(box) <= HOUR_S
        command = box.commands.start(["sleep", "100000"])
        sleeper.sleep(HOUR_S)
        assert end_of(box) == ("timed_out", "maximum")
        assert command.wait(20).by == "maximum"


# ---------------------------------------------------------------------------------------- limits

EAT = "x = []\nwhile True: x.append(b'x' * 1048576)"
FORK = """
import os, signal, time
made = []
try:
    while True:
        pid = os.fork()
        if not pid:
            time.sleep(1000)
        made.append(pid)
except OSError as refused:
    print(len(made), refused.errno)
for pid in made:
    os.kill(pid, signal.SIGKILL)
"""


@pytest.mark.req("RES-1")
def test_one_out_of_memory_its_neighbours_unaffected(node: RealNode) -> None:
    with node.sandbox(memory_mb=96) as greedy, node.sandbox(memory_mb=96) as neighbour:
        going_on = neighbour.commands.start(["sh", "-c", "for i in $(seq 30); do echo $i; sleep 0.1; done"])
        result = greedy.run(["python3", "-c", EAT])
        assert (str(result.ended), end_of(greedy)) == ("out_of_memory", ("out_of_memory", None))
        assert going_on.result().stdout == "".join(f"{n}\n" for n in range(1, 31))
        assert neighbour.run(["python3", "-c", "print(len(b'x' * 32 * 1048576))"]).stdout == f"{32 * MIB}\n"
        assert neighbour.info().ended is None


@pytest.mark.req("RES-1")
def test_a_fork_bomb_gets_an_error_and_its_sandbox_lives(node: RealNode) -> None:
    with node.sandbox(processes=32) as box:
        made, number = map(int, box.run(["python3", "-c", FORK]).stdout.split())
        assert (8 <= made <= 32, number) == (True, 11), (made, number)  # gVisor counts one process less
        bomb = box.run(["sh", "-c", "bomb() { bomb | bomb & }; bomb; sleep 100"], timeout_s=2)
        assert str(bomb.ended) == "timed_out"
        wait_until(lambda: box.run(["echo", "alive"]).stdout == "alive\n", 30, "room for another process")
        assert box.info().ended is None
    print(f"\nfork bomb: {made} of 32 processes, then EAGAIN")


@pytest.mark.req("RES-1")
def test_a_full_disk_is_said_and_is_only_its_own(node: RealNode) -> None:
    with node.sandbox(disk_mb=64) as box, node.sandbox(disk_mb=64) as neighbour:
        full = box.run(["sh", "-c", f"head -c {200 * MIB} /dev/zero >/workspace/big"])
        assert full.exit_code != 0
        assert "No space left on device" in full.stderr
        assert int(box.run(["stat", "-c", "%s", "/workspace/big"]).stdout) <= 64 * MIB
        assert refusal(lambda: box.files.write("/workspace/more", b"x" * 8 * MIB)) == "no_space"
        neighbour.files.write("/workspace/more", b"x" * 32 * MIB)
        assert box.run(["rm", "/workspace/big"]).ok
        box.files.write("/workspace/more", b"x" * 8 * MIB)
        assert box.info().ended is None


@pytest.mark.req("RES-1")
def test_output_beyond_its_limit_ends_the_command_and_not_the_sandbox(node: RealNode) -> None:
    with node.sandbox(memory_mb=64) as box:
        result = box.run(["sh", "-c", "yes"], output_bytes_max=MIB)
        assert (str(result.ended), len(result.stdout_bytes)) == ("output_limit", MIB)
        assert box.run(["echo", "on"]).stdout == "on\n"
