"""Without a terminal: no colour, no spinner, nothing of ours on stdout. With one: progress after a second."""

import io
import os
import pty
import sys

import pytest

from cloche.cli import progress, render

pytestmark = pytest.mark.req("UX-4")


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_colour_only_on_a_terminal_and_not_against_the_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert render.styled("x", "31", Screen()) == "\x1b[31mx\x1b[0m"
    assert render.styled("x", "31", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert render.styled("x", "31", Screen()) == "x"


def test_nothing_spins_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.0)
    with progress.spinning("starting"), progress.counting("copying", 10) as advance:
        advance(5)
    assert stream.getvalue() == ""


def test_a_terminal_sees_progress_on_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(slave, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        with progress.counting("copying ./data", 10) as advance:
            advance(10)
    assert b"copying ./data" in os.read(master, 65536)
    os.close(master)


def test_signs_are_ascii_where_nothing_else_fits() -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert render.sign("✗", "x", narrow) == "x"
    assert render.sign("✗", "x", io.StringIO()) == "✗"
