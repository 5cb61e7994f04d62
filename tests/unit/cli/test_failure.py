"""Errors say what happened, why, and the next command to type."""

import pytest

from cloche.cli import failure
from cloche.wire.ends import End, EndReason
from cloche.wire.errors import TABLE, error
from cloche.wire.sandboxes import Limits
from tests.unit.cli.conftest import make_box, make_command

pytestmark = pytest.mark.req("UX-6")


def test_out_of_memory_reads_as_promised(capsys: pytest.CaptureFixture[str]) -> None:
    end = End(reason=EndReason.OUT_OF_MEMORY)
    box = make_box(limits=Limits(memory_bytes=64 << 20), ended=end)
    assert failure.show_end(make_command(end), box) == 137
    assert capsys.readouterr().err.splitlines() == [
        "✗ out_of_memory: the sandbox reached its memory limit of 64 MB and was ended by the node.",
        "  peak 64.0 MB · while running `python3 train.py` (c7f3k2) · 2.1 s after start",
        "  Try --memory 512m, or see what used it: cloche logs sk3m9q --events",
    ]


def test_a_sandbox_that_took_its_command_along_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    box = make_box(ended=End(reason=EndReason.OUT_OF_MEMORY))
    command = make_command(End(reason=EndReason.KILLED, by="sandbox"))
    assert failure.show_end(command, box) == 137
    assert capsys.readouterr().err.startswith("✗ out_of_memory: ")


def test_a_time_out_names_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure.show_end(make_command(End(reason=EndReason.TIMED_OUT, by="timeout")), None) == 124
    said = capsys.readouterr().err
    assert "its time limit of 5 min" in said
    assert "--timeout 10m" in said


@pytest.mark.parametrize("code", sorted(TABLE))
def test_every_error_has_its_code_and_its_fix(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert failure.show_error(error(code, "it happened")) == TABLE[code].exit_code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"✗ {code}: it happened."
    assert lines[-1] == f"  {TABLE[code].fix}"


@pytest.mark.parametrize("reason", list(EndReason))
def test_no_end_is_shown_without_words(reason: EndReason, capsys: pytest.CaptureFixture[str]) -> None:
    end = End(reason=reason, exit_code=0 if reason is EndReason.EXITED else None, signal=11)
    failure.show_end(make_command(end), make_box(ended=end))
    said = capsys.readouterr().err
    assert (said == "") == (reason is EndReason.EXITED)
    if said:
        assert len(said.splitlines()) == 3


def test_what_a_guest_chose_cannot_act(capsys: pytest.CaptureFixture[str]) -> None:
    end = End(reason=EndReason.NOT_STARTED, error_code="command_not_found", detail="no \x1b]52;c;eA==\x07 here\u202e")
    failure.show_end(make_command(end, argv=["\x1b[2J", "a\nb"]), None)
    failure.show_error(error("guest_io", "\x9b31m", detail={"path": "/x\x1b]0;t\x07"}))
    said = capsys.readouterr().err
    assert not set(said) & set("\x1b\x07\x9b\u202e")
    assert "\\x1b]52;c;eA==\\x07" in said
    assert "⟦U+202E⟧" in said
