"""Daemon and keeper killed and replaced under load: no sandbox ends, no byte is lost, none comes twice, nothing runs twice."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cloche.client import Command, Node, Sandbox
from cloche.errors import ClocheError
from cloche_server.node.launch import up as launcher
from tests.promises.conversations import Conversation, Figures
from tests.promises.evil import EvilImages
from tests.promises.hostile import SMALL, ended
from tests.promises.nodes import RealNode, wait_until
from tests.promises.plants import (
    POINTS_WHILE_IT_RUNS,
    POINTS_WHILE_IT_STARTS,
    PlantedNode,
    guest_processes,
    planted_node,
    sentry_pid,
)
from tests.promises.traces import traces

FULL_TIMEOUT_S = 3600
SOON_S = 3.0
"""After a daemon's start, whatever a guest does: the API answers and the other sandboxes work."""
COUNTING = "for i in $(seq 100); do echo $i; sleep 0.05; done"


@pytest.fixture
def planted() -> Iterator[PlantedNode]:
    with planted_node() as node:
        yield node


def after_a_moment(chance: random.Random, longest_s: float) -> None:
    """Lets a random time pass."""
    until = time.monotonic() + chance.uniform(0.0, longest_s)
    wait_until(lambda: time.monotonic() >= until)


def kill_plan(chance: random.Random, random_kills: int, rounds: int) -> list[str]:
    """`random` so often, each named point so often, in a random order."""
    plan = ["random"] * random_kills + [*POINTS_WHILE_IT_RUNS, *POINTS_WHILE_IT_STARTS] * rounds
    chance.shuffle(plan)
    return plan


def kill_once(node: PlantedNode, how: str, chance: random.Random, boxes: int) -> None:
    """The daemon dies that way, and another one is there."""
    if how == "random":
        after_a_moment(chance, 1.0)
        node.kill_daemon()
    elif how in POINTS_WHILE_IT_STARTS:
        node.kill_daemon()
        node.start_and_die_at(how, passing=chance.randint(1, boxes))
    else:
        node.die_at(how, passing=chance.randint(1, 4))
        node.wait_struck()
    node.start()


def go_on(talks: list[Conversation]) -> None:
    """Everything moves again."""
    before = [talk.progress for talk in talks]
    for talk, then in zip(talks, before, strict=True):
        talk.wait_for_progress(then)


def told(what: str, figures: Figures, started: float) -> None:
    print(
        f"\n{what}: {figures.printed_bytes:,} bytes printed, {figures.stdin_bytes:,} bytes of stdin, "
        f"{figures.short_commands} short commands, all equal; {time.monotonic() - started:.0f} s"
    )


@pytest.mark.req("LIF-6")
@pytest.mark.req("EXE-4")
@pytest.mark.timeout(FULL_TIMEOUT_S)
def test_killing_the_daemon_loses_nothing_and_repeats_nothing(planted: PlantedNode, seed: int, long_run: bool) -> None:
    chance, started = random.Random(seed), time.monotonic()
    count, flood_every = (10, 200) if long_run else (3, 40)
    pause_s = 0.4 if long_run else 0.1
    talks = [Conversation(planted, f"{seed} {n}", flood_every=flood_every, pause_s=pause_s) for n in range(count)]
    sentries = [sentry_pid(planted, talk.box_id) for talk in talks]
    plan = kill_plan(chance, *((100, 5) if long_run else (4, 1)))
    for how in plan:
        kill_once(planted, how, chance, count)
        go_on(talks)
    figures = sum((talk.finish() for talk in talks), Figures())
    assert [sentry_pid(planted, talk.box_id) for talk in talks] == sentries
    told(f"{len(plan)} daemons killed under {count} sandboxes (seed {seed})", figures, started)
    assert figures.short_commands > count


@pytest.mark.req("LIF-6")
@pytest.mark.timeout(FULL_TIMEOUT_S)
def test_killing_or_replacing_the_keeper_ends_no_sandbox(planted: PlantedNode, seed: int, long_run: bool) -> None:
    chance, started = random.Random(seed), time.monotonic()
    count, kills = (10, 20) if long_run else (3, 3)
    pause_s = 0.4 if long_run else 0.1
    talks = [Conversation(planted, f"{seed} {n}", flood_every=100, pause_s=pause_s) for n in range(count)]
    ways: list[Callable[[], None]] = [planted.kill_keeper, planted.replace_keeper, planted.restart_daemon]
    plan = [ways[n % 2] for n in range(kills)] + [planted.restart_daemon] * (kills // 3)
    chance.shuffle(plan)
    for way in plan:
        after_a_moment(chance, 0.5)
        way()
        with planted.sandbox(memory_mb=64) as box:  # a successor makes new ones
            assert box.run(["echo", "new"]).stdout == "new\n"
        go_on(talks)
    figures = sum((talk.finish() for talk in talks), Figures())
    told(f"{kills} keepers killed or replaced under {count} sandboxes (seed {seed})", figures, started)


@pytest.mark.req("LIF-6")
def test_a_sandbox_is_killed_even_if_the_keeper_died_just_before(planted: PlantedNode) -> None:
    with planted.client() as client, planted.sandbox(memory_mb=64) as box:
        os.kill(planted.keeper_pid(), signal.SIGKILL)
        ended = box.kill().ended
        assert ended is not None
        assert ended.reason == "killed"
        assert box.id not in [each.id for each in client.list()]
    wait_until(lambda: not guest_processes(planted), what="its processes to be gone")


def second_daemon(node: RealNode, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    """A daemon for the same directories, by a launcher that does not see the first one."""
    seen = iter([False])
    monkeypatch.setattr(launcher, "is_healthy", lambda socket: next(seen, True))
    return launcher.up(node.paths, mode=node.mode, more=more)


@pytest.mark.req("LIF-6")
def test_a_second_daemon_is_refused_by_name(own_node: RealNode, monkeypatch: pytest.MonkeyPatch) -> None:
    with own_node.sandbox(memory_mb=64) as box:
        keeper = own_node.keeper_pid()
        second = second_daemon(own_node, monkeypatch)
        _, status = os.waitpid(second, 0)
        assert os.waitstatus_to_exitcode(status) == 125
        last = json.loads(own_node.log().strip().splitlines()[-1])
        assert last["code"] == "node_busy"
        assert f"process {own_node.pid})" in last["message"]
        assert box.run(["echo", "still"]).stdout == "still\n"
        assert own_node.keeper_pid() == keeper


@pytest.mark.req("LIF-6")
def test_a_replacing_daemon_waits_for_the_first_and_goes_on(
    own_node: RealNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_node.sandbox(memory_mb=64) as box:
        going_on = box.commands.start(COUNTING)
        second = second_daemon(own_node, monkeypatch, "--replace")
        after_a_moment(random.Random(0), 2.0)
        assert os.waitpid(second, os.WNOHANG) == (0, 0), "it did not wait"
        own_node.kill_daemon()
        own_node.pid = second
        assert going_on.result().stdout == "".join(f"{n}\n" for n in range(1, 101))
        with own_node.client() as client:
            assert client.info().pid == second
            assert box.info().ended is None


@pytest.mark.req("LIF-6")
@pytest.mark.req("ISO-7")
@pytest.mark.alone
@pytest.mark.timeout(300)
def test_a_guest_that_ignores_the_new_daemon_keeps_nobody_waiting(
    own_evil_node: RealNode, evil_image: EvilImages
) -> None:
    """It is silent on RESET. The API answers and every other sandbox works soon after the daemon's start."""
    node = own_evil_node
    with node.client() as client:
        honest = [Sandbox.create(node=client, **SMALL).id for _ in range(3)]
    began = time.monotonic()
    node.restart_daemon()
    plain_s = time.monotonic() - began
    with node.client() as client:
        deaf = Sandbox.create(evil_image("reset-silent"), node=client, **SMALL).id
        going_on = [client.connect(each).commands.start(COUNTING) for each in honest]
        running = client.connect(deaf).commands.start(["hang"])
    node.kill_daemon()
    began = time.monotonic()
    node.start()
    with node.client() as client:
        listed = {each.id: each.view.state for each in client.list()}
        api_s = time.monotonic() - began
        assert [client.connect(each).run(["echo", "fine"]).stdout for each in honest] == ["fine\n"] * 3
        works_s = time.monotonic() - began
        assert listed == dict.fromkeys([deaf, *honest], "running")
        for each, command in zip(honest, going_on, strict=True):
            counted = client.connect(each).commands.get(command.id).result()
            assert counted.stdout == "".join(f"{n}\n" for n in range(1, 101))
        late = client.connect(deaf)
        with pytest.raises(ClocheError) as refused:
            late.run(["ok"])
        assert refused.value.code == "sandbox_ended", "it waited until that was known"
        assert ended(late) == "unresponsive"
        over_s = time.monotonic() - began
        assert late.commands.get(running.id).result().ended == "unresponsive"
        assert client.connect(honest[0]).run(["echo", "still"]).stdout == "still\n"
    print(
        f"\none deaf guest of four: the API answered {api_s:.2f} s after the daemon's start ({plain_s:.2f} s without it), "
        f"the others had worked after {works_s:.2f} s, the deaf one was over after {over_s:.1f} s"
    )
    assert works_s < max(SOON_S, plain_s + 1.5), "a machine may be slow, but not because of that guest"


@pytest.mark.req("LIF-6")
@pytest.mark.req("RES-2")
@pytest.mark.alone
def test_a_guest_that_ignores_the_new_daemon_is_killed_at_once(own_evil_node: RealNode, evil_image: EvilImages) -> None:
    with own_evil_node.client() as client:
        deaf = Sandbox.create(evil_image("reset-silent"), node=client, **SMALL).id
    own_evil_node.restart_daemon()
    with own_evil_node.client() as client:
        began = time.monotonic()
        end = client.connect(deaf).kill().ended
        killed_s = time.monotonic() - began
        assert end is not None
        assert end.reason == "killed"
    wait_until(lambda: not guest_processes(own_evil_node), what="its processes to be gone")
    print(f"\na deaf guest was killed in {killed_s:.2f} s")
    assert killed_s < SOON_S


@pytest.mark.req("LIF-6")
@pytest.mark.req("EXE-5")
def test_both_killed_at_once_every_sandbox_ends_and_nothing_is_left(own_node: RealNode, long_run: bool) -> None:
    with own_node.sandbox(memory_mb=64) as warm:  # what a first sandbox leaves for good is not of interest here
        warm.run(["true"])
    own_node.restart_daemon()
    before = traces(own_node)
    with own_node.client() as client:
        boxes = [Sandbox.create(node=client, memory_mb=64) for _ in range(10 if long_run else 3)]
        commands = [box.commands.start(["sh", "-c", "echo before; sleep 1000"]) for box in boxes]
        wait_until(lambda: all(command.info().output.end for command in commands), what="their output")
        keeper = client.info().keeper_pid
        assert keeper
        for pid in (own_node.pid, keeper):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(own_node.pid, 0)
        own_node.start()
        check_ended(own_node, client, boxes, commands)
    left = traces(own_node).more_than(before)
    ids = [box.id for box in boxes]
    cgroups: Any = left.pop("cgroups", [])  # other nodes of this machine have theirs in the same place
    assert [path for path in cgroups if any(one in path for one in ids)] == []
    assert left == {}
    with own_node.sandbox(memory_mb=64) as box:
        assert box.run(["echo", "new"]).stdout == "new\n"
    print(f"\nboth killed: {len(boxes)} sandboxes ended as host_failure, nothing left")


def check_ended(node: RealNode, client: Node, boxes: list[Sandbox], commands: list[Command]) -> None:
    wait_until(lambda: not guest_processes(node), what="every process of a sandbox to be gone")
    wait_until(lambda: client.list() == [], what="every end")
    listed = json.loads(node.cloche("ps", "--all", "--json").stdout)["sandboxes"]
    shown = {entry["id"]: (entry["state"], entry["ended"]["reason"]) for entry in listed}
    for box, command in zip(boxes, commands, strict=True):
        assert shown[box.id] == ("ended", "host_failure")
        ended, result = box.info().ended, command.result()
        assert ended is not None
        assert (ended.reason, result.ended, result.stdout) == ("host_failure", "host_failure", "before\n")
