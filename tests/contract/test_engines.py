"""One suite for every engine: what `engines/contract.py` promises, on a real sandbox behind a real keeper."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche_server.channel.reset import NONCE_BYTES, Scan, reset_bytes, resume_bytes
from cloche_server.engines.spec import SandboxSpec
from tests.unit.keeper import harness
from tests.unit.keeper.harness import DATA, Guest, Node, Refused, frame, new_id, spec, wait_until

ENGINES = [
    "gvisor",
    pytest.param(
        "qemu", marks=pytest.mark.skipif(not harness.has_microvm(), reason="no microVM kernel was built here")
    ),
]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with harness.node() as made:
        made.ask("start_watch")
        yield made


def started(node: Node, engine: str, wanted: SandboxSpec | None = None) -> tuple[str, dict[str, object], Guest]:
    wanted = wanted or spec(engine)
    booted = node.boot(wanted)
    node.ask("start", sandbox=wanted.id)
    guest = Guest(node, wanted.id)
    guest.hello()
    node.ask("seal", sandbox=wanted.id)
    guest.bind()
    return wanted.id, booted, guest


@pytest.mark.req("ISO-1")
@pytest.mark.req("EXE-1")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(180)
def test_the_life_of_a_sandbox(node: Node, engine: str) -> None:
    sandbox, booted, guest = started(node, engine)
    assert len(str(booted["digest"])) == 64
    end, output = guest.run("/usr/bin/python3", "-c", "print(6*7)")
    assert (end["ok"]["code"], output) == (0, b"42\n")
    stats = node.ask("stats", sandbox=sandbox)
    assert 0 < stats["memory_bytes"] <= stats["peak"] <= 256 << 20
    assert stats["cpu_s"] > 0
    node.ask("pause", sandbox=sandbox)
    node.ask("resume", sandbox=sandbox)
    end, output = guest.run("/bin/echo", "resumed")
    assert output == b"resumed\n"
    ended = node.ask("kill", sandbox=sandbox)
    assert ended["oom_kills"] == 0
    assert node.left(sandbox) == []


@pytest.mark.req("LIF-6")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(180)
def test_adopted_after_a_keepers_death(node: Node, engine: str) -> None:
    sandbox, booted, guest = started(node, engine)
    before = node.keeper_pid()
    os.kill(before, signal.SIGKILL)

    def again() -> bool:
        try:
            return node.keeper_pid() != before and node.ask("everything")[0]["channel"]
        except Refused:
            return False

    assert wait_until(again)
    _, output = guest.run("/bin/echo", "still here")
    assert output == b"still here\n"
    assert Path(f"/proc/{booted['pid']}").exists()
    node.ask("kill", sandbox=sandbox)
    assert node.left(sandbox) == []


@pytest.mark.req("LIF-6")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(180)
def test_attached_again_after_a_daemons_death(node: Node, engine: str) -> None:
    """RESET over the engine's carrier, with half a frame of the dead daemon in it: no byte is lost or repeated."""
    wanted = spec(engine)
    sandbox, booted, guest = started(node, engine, wanted)
    script = 'printf before; read line; printf "after $line"'
    stream = guest.start_command("/bin/sh", "-c", script)
    assert guest.expect(DATA, stream) == b"before"
    node.ask("send", sandbox=sandbox, hexed=frame(DATA, stream, b"x" * 1000)[:700].hex())
    node.kill_daemon()
    node.start()
    node.ask("start_watch")
    assert node.ask("adopt", spec=json.loads(wanted.to_json())) == {"pid": booted["pid"]}

    nonce = os.urandom(NONCE_BYTES)
    scan = Scan(nonce)
    node.ask("send", sandbox=sandbox, hexed=reset_bytes(nonce).hex())
    while (state := scan.feed(bytes.fromhex(node.ask("receive", sandbox=sandbox)))) is None:
        continue
    assert (state.streams[stream].sent, state.streams[stream].received) == (6, 0)
    again = Guest(node, sandbox, scan.rest, state.highest_host)
    # "before" was never written to a log: the guest is asked for it again.
    node.ask("send", sandbox=sandbox, hexed=resume_bytes(nonce, state, {stream: 0}).hex())
    node.ask("send", sandbox=sandbox, hexed=frame(DATA, stream, b"all\n").hex())
    assert again.result(stream)["ok"]["code"] == 0
    assert again.output(stream) == b"beforeafter all"
    assert again.run("/bin/echo", "next")[1] == b"next\n"
    node.ask("kill", sandbox=sandbox)
    assert node.left(sandbox) == []


@pytest.mark.req("LIF-2")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(180)
def test_a_killed_engine_is_noticed_and_removed(node: Node, engine: str) -> None:
    sandbox, booted, _ = started(node, engine)
    os.kill(int(str(booted["pid"])), signal.SIGKILL)
    began = time.monotonic()
    node.ask("wait_dead", sandbox=sandbox)
    assert time.monotonic() - began < 5
    ended = node.ask("kill", sandbox=sandbox)
    assert (ended["oom_kills"], ended["status"]) == (0, signal.SIGKILL)
    assert node.left(sandbox) == []


@pytest.mark.req("LIF-2")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_boot_that_fails_leaves_nothing(node: Node, engine: str) -> None:
    wanted = spec(engine, image_file="no-such.erofs")
    with pytest.raises(Refused) as caught:
        node.boot(wanted)
    assert caught.value.code == "image_not_found"
    assert node.left(wanted.id) == []


@pytest.mark.req("LIF-2")
@pytest.mark.parametrize("engine", ENGINES)
def test_an_id_is_used_once(node: Node, engine: str) -> None:
    wanted = spec(engine)
    node.boot(wanted)
    with pytest.raises(Refused) as caught:
        node.boot(wanted)
    assert caught.value.code == "create_failed"
    node.ask("kill", sandbox=wanted.id)
    assert node.left(wanted.id) == []


@pytest.mark.req("LIF-6")
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_not_alive_is_not_adopted(node: Node, engine: str) -> None:
    wanted = spec(engine, id=new_id())
    assert node.ask("adopt", spec=json.loads(wanted.to_json())) is None
    assert node.left(wanted.id) == []
