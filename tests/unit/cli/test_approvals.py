"""`cloche approvals`: verbs against the real queue over a socket, the watch's desk, and a person at a real terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.cli import asking
from cloche.cli.approvals import row, wish
from cloche.cli.watching import SETTLE_S, Desk, sentence
from cloche.wire.approvals import Approval
from tests.unit.approvals.questions import EVIL, question
from tests.unit.secrets.rooms_served import ServedRooms, rooms


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedRooms]:
    with rooms(tmp_path, scope_s_max=600.0) as one:
        monkeypatch.setenv("CLOCHE_URL", one.url)
        yield one


def make(number: int = 1, **fields: object) -> Approval:
    plain = {
        "id": f"aloc{number:016}",
        "sandbox": "sloc" + "k3m9q" + "a" * 11,
        "owner": "uid:1",
        "command_line": "python3 agent.py",
        "rule": "egress[1]",
        "host": "hooks.example.com",
        "port": 443,
        "address": "203.0.113.7",
        "method": "POST",
        "path": "/deploy",
        "asked_at": 0.0,
        "age_s": 12.0,
        "ends_in_s": 108.0,
        "state": "waiting",
    }
    return Approval.model_validate({**plain, **fields})


def test_a_question_reads_as_one_sentence() -> None:
    assert sentence(make()) == (
        "a00000 sk3m9q wants  POST https://hooks.example.com/deploy   (203.0.113.7)   asked by `python3 agent.py`, 12 s ago"
    )
    assert "(its address is looked up after your answer)" in sentence(make(address=""))
    assert wish(make(method=None)) == "hooks.example.com:443"
    assert wish(make(port=80, path=None)) == "POST http://hooks.example.com/"
    assert wish(make(port=8443)) == "POST hooks.example.com:8443/deploy", (
        "of another port nobody says whether it is TLS"
    )


def test_what_a_guest_chose_is_made_harmless_a_second_time() -> None:
    evil = make(host=EVIL, path=EVIL, command_line=EVIL, address=EVIL, method=EVIL)
    assert sentence(evil).isprintable()


@pytest.mark.req("POL-3")
def test_a_key_answers_only_what_was_seen_for_a_moment() -> None:
    desk = Desk()
    assert desk.look([], 0.0) == []
    assert desk.key("a", 0.0) == (None, [])
    lines = desk.look([make(1), make(2)], 10.0)
    assert [lines[0][:6], lines[1].strip()[:10]] == ["a00000", "[a]pprove "]
    assert desk.key("a", 10.0 + SETTLE_S / 2) == (None, []), "typed before anybody could read it"
    assert desk.key("a", 10.0 + SETTLE_S)[0] == "approve"
    assert desk.key("x", 20.0) == (None, [])
    assert desk.key("?", 20.0)[1][0].startswith("    rule egress[1] says ask")
    assert desk.key("s", 20.0)[0] is None, "there is no scope to give"
    lines = desk.look([make(2), make(1, state="timed_out")], 21.0)
    assert lines[0] == "    timed out"
    assert desk.shown is not None
    assert desk.shown.id == make(2).id
    assert desk.key("a", 21.0 + SETTLE_S / 2) == (None, []), "a key meant for the one before"
    assert desk.key("d", 22.0)[0] == "deny"
    desk.look([make(2, state="approved", answered_by="uid:5")], 23.0)
    assert desk.shown is None
    assert desk.key("a", 30.0) == (None, [])
    desk.look([make(3, scope_s_max=600.0)], 40.0)
    assert desk.key("s", 41.0)[0] == "scope"
    assert desk.key("q", 41.0)[0] == "quit"


def test_a_row_is_short_and_says_who() -> None:
    mine = make(state="approved", answered_by=f"uid:{os.getuid()}", command_line="x" * 300)
    assert row(mine)[-2] == "approved by me"
    assert len(row(mine)[-1]) == 60
    assert row(make(state="timed_out"))[-2] == "timed out"


TELLS = """
import sys
from types import SimpleNamespace as Of
from cloche.cli import asking
box = Of(id=sys.argv[1], view=Of(egress=Of(rules=["egress[0]: ask hooks.example.com 443"])))
with asking.telling(box):
    sys.stdin.readline()
"""


def test_who_runs_it_at_a_terminal_is_told_that_it_waits(served) -> None:
    leader, follower = pty.openpty()
    run = subprocess.Popen(
        [sys.executable, "-c", TELLS, question().sandbox], stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    try:
        verdict = ask(served)
        assert asking.notice(make()) in read_until(leader, "another terminal)")
        served.run(_deny(served))
        assert not verdict.result(10).approved
        os.write(leader, b"\n")
        assert run.wait(10) == 0
    finally:
        run.kill()
        run.wait()
        os.close(leader)


def ask(served: ServedRooms, **fields: object):
    return served.run(served.backend.approvals.ask(question(**fields), timeout_s=30.0))


def wait_for_one(cloche) -> str:
    end = time.monotonic() + 10.0
    while not (found := cloche("approvals", "ls", "-q").stdout.split()):
        assert time.monotonic() < end
    return found[0]


@pytest.mark.req("POL-3")
def test_ls_approve_deny(served, cloche) -> None:
    assert cloche("approvals").stdout.split()[0] == "ID"
    verdict = ask(served)
    one = wait_for_one(cloche)
    lines = cloche("approvals").stdout.splitlines()
    assert lines[1].split()[0] == one
    assert "POST https://hooks.example.com/deploy  203.0.113.7" in lines[1]
    result = cloche("approvals", "approve", one, "--for", "10m")
    assert (result.exit_code, result.stderr.startswith("✓ approved ")) == (0, True)
    assert verdict.result(5).approved
    assert ask(served).result(5).reason == "scope"
    other = ask(served, host="b.example")
    result = cloche("approvals", "deny", wait_for_one(cloche))
    assert result.stderr.startswith("✓ denied ")
    assert not other.result(5).approved
    assert cloche("approvals", "approve", "nosuch").exit_code == 125
    assert "approval_over" in cloche("approvals", "approve", one).stderr
    states = [each["state"] for each in json.loads(cloche("approvals", "ls", "--all", "--json").stdout)["approvals"]]
    assert sorted(states) == ["approved", "denied"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", "from cloche.cli.main import main; main()", "approvals", *words]


def read_until(fd: int, text: str, time_s: float = 15.0) -> str:
    seen, end = "", time.monotonic() + time_s
    while text not in seen:
        left = end - time.monotonic()
        assert left > 0, f"{text!r} did not come: {seen!r}"
        if select.select([fd], [], [], left)[0]:
            seen += os.read(fd, 4096).decode()
    return seen


@pytest.mark.req("POL-3")
def test_a_person_at_a_terminal_approves_by_a_key(served) -> None:
    leader, follower = pty.openpty()
    watch = subprocess.Popen(command("watch"), stdin=follower, stdout=follower, stderr=follower, env={**os.environ})
    os.close(follower)
    try:
        read_until(leader, "waiting for questions")
        verdict = ask(served)
        screen = read_until(leader, "why is this asked")
        assert "wants  POST https://hooks.example.com/deploy   (203.0.113.7)   asked by `python3 agent.py`" in screen
        assert "[s] approve for 10 min" in screen
        os.write(leader, b"a")
        assert not verdict.done(), "typed too early to have been read"
        time.sleep(SETTLE_S + 0.1)  # sleep: as long as a question must have been on the screen
        os.write(leader, b"a")
        assert verdict.result(10).approved
        read_until(leader, "approved by")
        os.write(leader, b"q")
        assert watch.wait(10) == 0
    finally:
        watch.kill()
        watch.wait()
        os.close(leader)


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_without_a_terminal_it_prints_lines(served, words) -> None:
    with subprocess.Popen(command("watch", *words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as watch:
        assert watch.stdout is not None
        verdict = ask(served, path=EVIL)
        first = watch.stdout.readline().decode()
        served.run(_deny(served))
        second = watch.stdout.readline().decode()
        watch.terminate()
    assert first.rstrip("\n").isprintable()
    assert not verdict.result(5).approved
    if words:
        assert [json.loads(line)["state"] for line in (first, second)] == ["waiting", "denied"]
    else:
        assert "wants  POST https://hooks.example.com" in first
        assert second.rstrip().endswith(" denied by you" if os.getuid() == 0 else " denied by root")


async def _deny(served: ServedRooms) -> None:
    from cloche.wire.approvals import Answer
    from tests.unit.approvals.questions import ROOT

    (asked,) = (await served.backend.approvals.list(ROOT)).approvals
    served.backend.approvals.answer(ROOT, asked.id, Answer(answer="deny"))
