"""A guest that does its worst: its own sandbox pays, the daemon stays up and bounded, the neighbours do not notice."""

from __future__ import annotations

import random
import time
from collections import deque

import pytest

from cloche.client import Sandbox
from cloche.wire.errors import ClocheError
from cloche_server.channel.frames import Kind
from tests.promises.evil import EvilImages, spec
from tests.promises.hostile import (
    BROKEN,
    FLOODS,
    FULL_TIMEOUT_S,
    GROWTH_BYTES_MAX,
    SMALL,
    Neighbour,
    daemon_peak_bytes,
    ended,
)
from tests.promises.nodes import RealNode, wait_until

# ---------------------------------------------------------------- frames


@pytest.mark.req("ISO-7")
@pytest.mark.timeout(FULL_TIMEOUT_S)
def test_each_broken_rule_ends_that_sandbox_by_name(
    evil_node: RealNode, evil_image: EvilImages, seed: int, long_run: bool
) -> None:
    chance, image = random.Random(seed), evil_image("serve")
    names = list(BROKEN) if long_run else chance.sample(list(BROKEN), 10)
    with Neighbour(evil_node) as neighbour, evil_node.client() as client:
        boxes = {}
        for name in names:
            boxes[name] = Sandbox.create(image, node=client, **SMALL)
            boxes[name].commands.start(["frames", *BROKEN[name]])
        wrong = {name: why for name, box in boxes.items() if (why := ended(box)) != "protocol_error"}
    assert wrong == {}
    assert neighbour.failures == []
    print(f"\n{len(names)} of {len(BROKEN)} broken rules (seed {seed}): each protocol_error; {neighbour}")


@pytest.mark.req("ISO-7")
@pytest.mark.req("EXE-1")
@pytest.mark.timeout(FULL_TIMEOUT_S)
def test_floods_are_survived_and_bounded(
    evil_node: RealNode, evil_image: EvilImages, seed: int, long_run: bool
) -> None:
    """Frames that break no rule and say nothing, by the million; then streams as many; then something malformed. CI takes a few of each."""
    frames, opens, noisy = (10_000_000, 1_000_000, 300) if long_run else (30_000, 20_000, 3)
    each = frames // len(FLOODS)
    before, started, done = daemon_peak_bytes(evil_node), time.monotonic(), 0
    with Neighbour(evil_node) as neighbour:
        with evil_node.sandbox(image=evil_image("serve"), **SMALL) as box:
            for name, specs in FLOODS.items():
                result = box.run(["repeat", str(each), *specs], timeout_s=3000)
                assert result.stdout == f"sent {each}\n", (name, result)
                done += each
            assert box.run(["opens", str(opens)], timeout_s=3000).stdout == f"sent {opens}\n"
            done += opens
        reasons: dict[str, int] = {}
        for number in range(noisy):
            with evil_node.sandbox(image=evil_image("serve"), **SMALL) as box:
                box.commands.start(["random", str(seed + number), "10000"])
                reason = ended(box)
                reasons[reason] = reasons.get(reason, 0) + 1
        grown = daemon_peak_bytes(evil_node) - before
    print(
        f"\n{done:,} frames, {noisy} × random frames (seed {seed}) {reasons}, {time.monotonic() - started:.0f} s: "
        f"daemon grew {grown / 1e6:.1f} MB at its peak; {neighbour}"
    )
    assert set(reasons) == {"protocol_error"}
    assert neighbour.failures == []
    assert grown < GROWTH_BYTES_MAX


@pytest.mark.req("ISO-7")
def test_a_guest_that_never_reads_or_never_ends_a_frame_is_held_back(
    evil_node: RealNode, evil_image: EvilImages
) -> None:
    before = daemon_peak_bytes(evil_node)
    with Neighbour(evil_node) as neighbour, evil_node.client() as client:
        boxes = [Sandbox.create(evil_image("serve"), node=client, **SMALL) for _ in range(3)]
        boxes[0].commands.start(["repeat-deaf", "100000000", spec(Kind.PING, 0, bytes(64))])
        boxes[1].commands.start(["endless"])
        boxes[2].commands.start(["stuck"])
        count = len(neighbour.seconds)
        wait_until(lambda: len(neighbour.seconds) > count + 20 or neighbour.failures, 60, "20 answers meanwhile")
        for box in boxes:
            began = time.monotonic()
            box.kill()
            assert ended(box) == "killed"
            assert time.monotonic() - began < 10
    grown = daemon_peak_bytes(evil_node) - before
    print(f"\ndeaf, endless and stuck: daemon grew {grown / 1e6:.1f} MB at its peak; {neighbour}")
    assert neighbour.failures == []
    assert grown < GROWTH_BYTES_MAX


@pytest.mark.req("ISO-7")
def test_streams_that_never_end_are_counted(evil_node: RealNode, evil_image: EvilImages) -> None:
    before = daemon_peak_bytes(evil_node)
    with evil_node.sandbox(image=evil_image("serve"), **SMALL) as box:
        with pytest.raises(ClocheError) as full:
            deque((box.commands.start(["hang"]) for _ in range(600)), maxlen=0)
        assert full.value.code == "overloaded", full.value
        with evil_node.sandbox(**SMALL) as other:
            assert other.run(["echo", "fine"]).stdout == "fine\n"
    assert daemon_peak_bytes(evil_node) - before < GROWTH_BYTES_MAX


STARTS = {
    "exit-at-once": "create_failed",
    "exit-after-hello": "create_failed",
    "hello-noise": "create_failed",
    "hello-twice": "create_failed",
    "gen 2": "guest_too_new",
    "gen 0": "guest_too_old",
    'gen "x"': "create_failed",
    "bind-refused": "create_failed",
}
SLOW_STARTS = {"silent": "create_failed", "hello-endless": "create_failed", "bind-never": "create_failed"}


@pytest.mark.req("ISO-7")
@pytest.mark.timeout(FULL_TIMEOUT_S)
def test_an_agent_that_starts_wrongly_fails_the_create_by_name(
    evil_node: RealNode, evil_image: EvilImages, long_run: bool
) -> None:
    for behaviour, code in {**STARTS, **(SLOW_STARTS if long_run else {})}.items():
        with evil_node.client(request_timeout_s=120) as client, pytest.raises(ClocheError) as failed:
            Sandbox.create(evil_image(behaviour), node=client, **SMALL)
        assert failed.value.code == code, (behaviour, failed.value)
        assert failed.value.message.isprintable(), failed.value.message
        if behaviour == "bind-refused":
            assert "could not prepare the guest" in failed.value.message, failed.value.message
    with evil_node.sandbox(image=evil_image("hello-escapes"), **SMALL) as box:
        assert box.run(["ok"]).stdout == "ok\n"
    with evil_node.client() as client:
        assert [box.id for box in client.list()] == []


STREAM = '{"op":"exec","command":"x","opened":true,"sent":%s,"acked":%s,"received":0,"eof_sent":false,"eof_received":false,"ended":false}'
LIES = {
    "not an object": "[]",
    "streams that are a list": '{"streams":[],"highest_host":4,"highest_guest":0}',
    "no highest": '{"streams":{}}',
    "negative": '{"streams":{"4":' + STREAM % (-1, 0) + '},"highest_host":6,"highest_guest":0}',
    "acked beyond sent": '{"streams":{"4":' + STREAM % (0, 10**18) + '},"highest_host":6,"highest_guest":0}',
    "a stream of a million digits": '{"streams":{"' + "9" * 50_000 + '":{}},"highest_host":6,"highest_guest":0}',
    "above the highest": '{"streams":{"400":' + STREAM % (0, 0) + '},"highest_host":6,"highest_guest":0}',
    "too many": '{"streams":{'
    + ",".join(f'"{n}":' + (STREAM % (0, 0)).replace(',"eof_received":false', "") for n in range(2, 1600, 2))
    + '},"highest_host":1600,"highest_guest":0}',
    "deep": '{"streams":' + "[" * 3000 + "]" * 3000 + "}",
}


@pytest.mark.req("ISO-7")
@pytest.mark.timeout(300)
def test_lies_in_state_end_their_teller_alone(own_evil_node: RealNode, evil_image: EvilImages) -> None:
    node = own_evil_node
    behaviours = {name: f"reset-lies {text}" for name, text in LIES.items()}
    behaviours |= {name: name for name in ("reset-silent", "reset-exit", "reset-garbage", "reset-endless")}
    with node.client() as client:
        boxes = {name: Sandbox.create(evil_image(how), node=client, **SMALL).id for name, how in behaviours.items()}
        for each in boxes.values():
            client.connect(each).commands.start(["hang"])
        honest = Sandbox.create(node=client, **SMALL)
        going_on = honest.commands.start("for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.3; done")
    began = time.monotonic()
    node.restart_daemon()
    up_s = time.monotonic() - began
    with node.client() as client:
        reasons = {name: ended(client.connect(each)) for name, each in boxes.items()}
        over_s = time.monotonic() - began
        again = client.connect(honest.id)
        result = again.commands.get(going_on.id).result()
        assert result.stdout == "".join(f"{n}\n" for n in range(1, 10))
        assert again.run(["echo", "fine"]).stdout == "fine\n"
    print(
        f"\nSTATE lies: {reasons}; daemon up after {up_s:.1f} s, all over after {over_s:.1f} s, {node.daemon_rss_bytes() / 1e6:.0f} MB"
    )
    assert {reasons[name] for name in LIES} == {"protocol_error"}, reasons
    assert reasons["reset-silent"] == "unresponsive"
    assert reasons["reset-endless"] in ("unresponsive", "protocol_error")
    assert reasons["reset-garbage"] in ("unresponsive", "protocol_error")
    assert reasons["reset-exit"] == "host_failure"


@pytest.mark.req("ISO-7")
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_guest_that_answers_nothing_is_ended(evil_node: RealNode, evil_image: EvilImages) -> None:
    with evil_node.sandbox(image=evil_image("serve"), ttl_s=600, **SMALL) as box:
        box.commands.start(["deaf"], timeout_s=1)
        wait_until(lambda: box.info().ended is not None, 200, "the end of a deaf guest")
        assert ended(box) == "unresponsive"
