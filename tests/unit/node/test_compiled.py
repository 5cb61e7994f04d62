"""Compiled files beside the daemon's sources: made once, and only where that is wanted."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from cloche_server.node.launch import compiled


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "cloche_tiny_module.py"
    file.write_text("number = 42\n")
    monkeypatch.setattr(compiled, "WITNESS", file)
    monkeypatch.setattr(compiled, "MODULES", (file.stem,))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    return file


def cached(file: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(file)))


def test_it_is_there_afterwards_and_not_made_again(module: Path) -> None:
    with compiled.compiling():
        pass
    made = cached(module).stat()
    assert made.st_mode & 0o444 == 0o444
    with compiled.compiling():
        pass
    assert cached(module).stat().st_mtime_ns == made.st_mtime_ns


def test_a_newer_source_is_compiled_again(module: Path) -> None:
    with compiled.compiling():
        pass
    before = cached(module).read_bytes()
    module.write_text("number = 43  # another size\n")
    os.utime(module, (2_000_000_000, 2_000_000_000))
    with compiled.compiling():
        pass
    assert cached(module).read_bytes() != before


def test_who_wants_no_compiled_files_gets_none(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    with compiled.compiling():
        pass
    assert not cached(module).exists()


@pytest.mark.parametrize("before", ["import os; os.abort()", "import signal; signal.pause()"])
def test_what_was_cut_off_is_tried_again(module: Path, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """The witness comes last: it is not there when the others may not be. One that hangs keeps nobody waiting."""
    (module.parent / "cloche_tiny_first.py").write_text(f"{before}\n")
    monkeypatch.setattr(compiled, "MODULES", ("cloche_tiny_first", module.stem))
    monkeypatch.setattr(compiled, "COMPILE_S_MAX", 0.5)
    with compiled.compiling():
        pass
    assert not cached(module).exists()
    monkeypatch.setattr(compiled, "MODULES", (module.stem,))
    monkeypatch.setattr(compiled, "COMPILE_S_MAX", 60.0)
    with compiled.compiling():
        pass
    assert cached(module).exists()


def test_the_witness_is_the_last_that_is_named() -> None:
    found = importlib.util.find_spec(compiled.MODULES[-1])
    assert found is not None
    assert found.origin == str(compiled.WITNESS)


def test_what_is_imported_later_is_named() -> None:
    for name in compiled.MODULES:
        assert importlib.util.find_spec(name) is not None
