"""The way out at the command line: what options ask for, what a person reads of refusals, and what the verbs do."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cloche.cli import main, options
from cloche.cli.denials import show_denials
from cloche.cli.egress.show import row
from cloche.wire.commands import Command, CommandState, OutputState
from cloche.wire.egress import EgressRecord
from tests.unit.api.served import Served, served
from tests.unit.cli.conftest import BOX, COMMAND


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with served(tmp_path) as one:
        monkeypatch.setenv("CLOCHE_URL", one.url)
        monkeypatch.setenv("NO_COLOR", "1")
        yield one


def record(**fields: Any) -> EgressRecord:
    plain = {"seq": 1, "at": 0.0, "sandbox": BOX, "verdict": "denied", "code": "no_rule", "rule": "default"}
    return EgressRecord.model_validate({**plain, "host": "pastebin.example", "port": 443, "connection": 1, **fields})


def refused(*denials: EgressRecord) -> Command:
    return Command(
        id=COMMAND,
        sandbox=BOX,
        argv=["agent"],
        state=CommandState.ENDED,
        created_at=0.0,
        output=OutputState(),
        denials=list(denials),
    )


@pytest.mark.req("NET-3")
def test_options_become_rules_and_what_is_asked_stands_first(node: Served) -> None:
    words = [
        "--allow",
        "api.example.com",
        "--ask",
        "hooks.example.com",
        "--preset",
        "python-packages",
        "--secret",
        "KEY",
    ]
    assert main.run(["create", *words, "--allow", "*.example.org:8443"]) == 0
    (asked,) = node.backend.asked
    assert asked.egress == [
        "ask:hooks.example.com",
        "api.example.com",
        "*.example.org:8443",
        "preset:python-packages",
    ]
    assert asked.secrets == ["KEY"]
    assert options.egress_of({}) == []


@pytest.mark.req("NET-7")
def test_each_refusal_is_one_line_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    denials = [
        record(),
        record(seq=2),
        record(seq=3, host="203.0.113.9", port=22, code="needs_name"),
        record(seq=4, host="evil.example", code="denied_by_rule", rule="deny[0]"),
    ]
    show_denials(refused(*denials), lives=True)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("3 connections were not allowed:")
    assert lines[1].split(maxsplit=1)[0] == "pastebin.example:443"
    assert "no rule (default: deny)" in lines[1]
    assert lines[1].endswith("allow once: cloche egress allow sk3m9q pastebin.example --for 10m")
    assert lines[2].endswith("allow once: cloche egress allow sk3m9q 203.0.113.9:22 --for 10m")
    assert lines[3].endswith("see: cloche policy explain sk3m9q evil.example:443")
    show_denials(refused(record()), lives=False)
    one = capsys.readouterr().err
    assert "1 connection was not allowed" in one
    assert "allow it: --allow pastebin.example" in one
    show_denials(refused(), lives=True)
    assert capsys.readouterr().err == ""


@pytest.mark.req("NET-7")
def test_what_a_person_did_not_approve_says_which_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    for why in ("a person denied it", "nobody answered within 120 s"):
        show_denials(refused(record(code="not_approved", text=why)), lives=False)
        line = capsys.readouterr().err.splitlines()[1]
        assert line.split("  ") == ["", "pastebin.example:443", why, "answer such questions: cloche approvals watch"]


@pytest.mark.req("UX-6")
def test_what_a_guest_chose_cannot_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = record(host="a\x1b[2J\u202eb.example", path="/\x1b]52;c;x\x07", method="GET", rule="\x1b[0m")
    show_denials(refused(evil), lives=True)
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "\u202e" not in said
    from cloche.cli import render

    render.table(("A", "B", "C", "D", "E", "F"), [row(evil)])
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.req("NET-6")
def test_records_are_shown_with_and_without_the_verb(node: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["create", "--name", "box"]) == 0
    box = next(iter(node.backend.sandboxes))
    node.backend.attempt(box, "one.example", "allowed", "allowed")
    node.backend.attempt(box, "two.example")
    capsys.readouterr()
    for words in (["egress", "box"], ["egress", "show", "box"]):
        assert main.run(words) == 0
        said = capsys.readouterr().out
        assert "one.example:443" in said
        assert "two.example:443" in said
    assert main.run(["egress", "box", "--denied", "--json"]) == 0
    assert [json.loads(line)["host"] for line in capsys.readouterr().out.splitlines()] == ["two.example"]
    assert main.run(["kill", "box"]) == 0
    capsys.readouterr()
    assert main.run(["egress", "-f", box]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.req("NET-3")
def test_a_grant_is_given_listed_and_taken_back(node: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["create", "--name", "box"]) == 0
    capsys.readouterr()
    assert main.run(["egress", "allow", "box", "api.example.com", "--for", "90s"]) == 0
    name = capsys.readouterr().out.strip()
    assert main.run(["egress", "allow", "box", "hooks.example.com", "--ask"]) == 0
    capsys.readouterr()
    (box,) = node.backend.granted.values()
    assert [(each.rule.host, each.ends_in_s) for each in box.values()] == [
        ("api.example.com", 90),
        ("ask:hooks.example.com", 600),
    ]
    assert main.run(["egress", "grants", "box"]) == 0
    assert name in capsys.readouterr().out
    assert main.run(["egress", "revoke", "box", name]) == 0
    assert list(box) != [name]
    assert main.run(["egress", "revoke", "box", name]) == 1
    assert "grant_not_found" in capsys.readouterr().err
    assert main.run(["policy", "explain", "box", "pastebin.example:443"]) == 0
    assert capsys.readouterr().out == "deny   no rule allows pastebin.example:443\nrule   default\n"


@pytest.mark.req("NET-3")
def test_a_build_asks_as_a_sandbox_does(node: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ctx").mkdir()
    (tmp_path / "ctx" / "Dockerfile").write_text("FROM scratch\n")
    assert main.run(["image", "build", "--preset", "debian", "--allow", "a.example", str(tmp_path / "ctx")]) == 0
    ((asked, _),) = node.backend.builds
    assert asked.egress == ["a.example", "preset:debian"]


def test_a_name_that_was_only_looked_up_has_no_port(capsys: pytest.CaptureFixture[str]) -> None:
    show_denials(refused(record(host="evil.example", port=0)), lives=False)
    said = capsys.readouterr().err
    assert "evil.example  no rule" in said
    assert "--allow evil.example\n" in said


@pytest.mark.req("UX-4")
@pytest.mark.parametrize(("state", "said"), [("not made", True), ("ready", False)])
def test_what_takes_half_a_minute_the_first_time_is_said(
    node: Served, monkeypatch: pytest.MonkeyPatch, state: str, said: bool
) -> None:
    shown: list[str] = []

    @contextmanager
    def spinning(text: str) -> Iterator[None]:
        shown.append(text)
        yield

    monkeypatch.setattr("cloche.cli.progress.spinning", spinning)
    node.backend.interceptor = state
    assert main.run(["create", "--secret", "KEY"]) == 0
    assert any("interceptor" in text for text in shown) is said
