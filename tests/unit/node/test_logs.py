"""A line of the log is one JSON object, whatever is in it."""

from __future__ import annotations

import json

import pytest

from cloche_server.logs import Log


def test_a_line_is_json_and_holds_no_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    Log().info("it\nhappened", said="\x1b[31m", path=object)
    [line] = capsys.readouterr().err.splitlines()
    assert all(character.isprintable() for character in line)
    told = json.loads(line)
    assert (told["event"], told["level"], told["said"]) == ("it\nhappened", "info", "\x1b[31m")
    assert told["timestamp"].endswith("Z")


def test_an_error_tells_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("why")
    except ValueError as bad:
        Log().error("it failed", exc_info=bad)
    told = json.loads(capsys.readouterr().err)
    assert told["exception"].endswith("ValueError: why")
    assert "Traceback" in told["exception"]
