"""Text that a guest chose reaches a terminal escaped, whoever sent it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.promises.evil import EvilImages
from tests.promises.hostile import (
    BROKEN,
    ESCAPES,
    SMALL,
    ended,
)
from tests.promises.nodes import CLI, RealNode
from tests.promises.screens import Tty

# ---------------------------------------------------------------- what a terminal shows


def on_a_terminal(node: RealNode, *arguments: str) -> str:
    """All that the command line wrote to a terminal."""
    with Tty([str(CLI), *arguments], node.environment, rows=50, cols=200) as tty:
        tty.wait(60)
        tty.read()
        return tty.seen.decode("utf-8", "backslashreplace")


def assert_harmless(shown: str, what: str) -> None:
    for bad in ("\x1b[2J", "\x1b]52", "\x1b]0;", "\x07", "\u202e", "\x9b"):
        assert bad not in shown, f"{what} shows {bad!r}: {shown!r}"


@pytest.mark.req("ISO-7")
def test_a_guests_words_reach_a_terminal_escaped(evil_node: RealNode, evil_image: EvilImages, tmp_path: Path) -> None:
    error = json.dumps({"error": {"code": "io", "message": ESCAPES}})
    entry = {"name": ESCAPES, "path": "/t", "type": "dir", "size": 0, "mode": 0o755, "uid": 0, "gid": 0, "mtime_ns": 0}
    bad = json.dumps({"ok": {"files": 0, "errors": [{"path": ESCAPES, "code": "io", "message": ESCAPES}]}}).encode()
    files = {
        "t/tree": b"",
        "t/tree.end": bad,
        ".cloche/answers/fs.stat.end": json.dumps({"ok": {"entry": entry}}).encode(),
        ".cloche/answers/file.read.end": error.encode(),
    }
    with evil_node.sandbox(image=evil_image("serve", files), name="liar", **SMALL) as box:
        raw_output = on_a_terminal(evil_node, "exec", "liar", "--", "ok", ESCAPES)
        assert ESCAPES[:4] in raw_output, "exec passes a program's output on as it is"
        command = box.commands.start(["ok", ESCAPES])
        command.wait()
        for what in (
            ["exec", "liar", "--", "end", error],
            ["exec", "liar", "--", "end", json.dumps({"ok": {"code": ESCAPES}})],
            ["logs", "liar"],
            ["ps"],
            ["ps", "--all"],
            ["cp", "liar:/t/tree", str(tmp_path / "copy")],
            ["cp", str(Path(__file__)), "liar:/x"],
        ):
            shown = on_a_terminal(evil_node, *what)
            assert_harmless(shown, " ".join(what))
            if what[0] in ("logs", "cp") or error in what:
                assert "\\x1b" in shown, f"{what}: escaped, not hidden: {shown!r}"
        box.commands.start(["frames", BROKEN["noise"][0]])
        ended(box)
        for what in (["ps", "--all"], ["ps", "--all", "--json"], ["logs", "liar"], ["exec", "liar", "--", "ok"]):
            assert_harmless(on_a_terminal(evil_node, *what), " ".join(what))
    shown = on_a_terminal(evil_node, "create", evil_image("bind-refused"))
    assert_harmless(shown, "create")
    assert "\\x1b" in shown, shown
    assert_harmless(on_a_terminal(evil_node, "exec", f"no{ESCAPES}", "--", "ok"), "an unknown name")


@pytest.mark.req("ISO-7")
def test_hostile_names_of_an_honest_agent_are_escaped_too(evil_node: RealNode, tmp_path: Path) -> None:
    with evil_node.sandbox(name="names", **SMALL) as box:
        script = f"import os; os.makedirs('/tmp/t'); open('/tmp/t/' + {ESCAPES!r}.replace('/', ''), 'w'); os.mkfifo('/tmp/t/' + {ESCAPES!r} + 'p')"
        assert box.run(["python3", "-c", script], check=True).exit_code == 0
        for what in (
            ["cp", "names:/tmp/t", str(tmp_path / "copy")],
            ["cp", f"names:/tmp/t/{ESCAPES}missing", str(tmp_path / "x")],
            ["exec", "names", "--", f"/no/{ESCAPES}"],
        ):
            shown = on_a_terminal(evil_node, *what)
            assert_harmless(shown, " ".join(what))
