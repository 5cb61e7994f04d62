"""Copies go where they were sent, and nowhere else."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from cloche.cli import cp, port
from cloche.wire.errors import error
from cloche.wire.files import Entry, FileError, TreeResult


@pytest.mark.parametrize(
    ("text", "sandbox", "path"),
    [
        ("lab:/workspace/a", "lab", "/workspace/a"),
        ("sk3m9q:/a:b", "sk3m9q", "/a:b"),
        ("./a:b", None, "./a:b"),
        ("/a:b", None, "/a:b"),
        ("../lab:/x", None, "../lab:/x"),
        ("data", None, "data"),
        (":/x", None, ":/x"),
    ],
)
def test_which_side_is_inside(text: str, sandbox: str | None, path: str) -> None:
    assert cp.parse_side(text) == cp.Side(sandbox, path)


def test_a_path_inside_is_absolute() -> None:
    with pytest.raises(click.UsageError, match="lab:/workspace/x"):
        cp.parse_side("lab:x")


class FakeFiles:
    """One file inside, and a record of what was written."""

    def __init__(self, content: bytes = b"inside") -> None:
        self.content = content
        self.written: dict[str, bytes] = {}
        self.result = TreeResult(files=1)

    def stat(self, path: str, *, user: str | None = None) -> Entry:
        if path == "/folder":
            return Entry(name="folder", path=path, type="dir")
        if path.startswith("/new"):
            raise error("path_not_found", path)
        return Entry(name="../../evil", path=path, type="file", size=len(self.content), mode=0o4755)

    def read_parts(self, _path: str, *, user: str | None = None) -> Iterator[bytes]:
        yield self.content

    def write(self, path: str, data: Any, *, mode: int | None = None, user: str | None = None) -> int:
        self.written[path] = b"".join(data)
        return len(self.written[path])

    def download(self, _path: str, _target: Path, *, user: str | None = None) -> TreeResult:
        return self.result


@pytest.fixture
def files(node, monkeypatch: pytest.MonkeyPatch) -> FakeFiles:
    made = FakeFiles()
    monkeypatch.setattr(node, "connect", lambda _name: SimpleNamespace(files=made))
    return made


@pytest.mark.req("FS-2")
def test_a_link_at_the_target_is_replaced_and_not_followed(files, cloche, tmp_path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    target = tmp_path / "out"
    target.symlink_to(victim)
    assert cloche("cp", "lab:/tmp/x", str(target)).exit_code == 0
    assert victim.read_text() == "mine"
    assert not target.is_symlink()
    assert target.read_bytes() == b"inside"
    assert target.stat().st_mode & 0o7000 == 0


@pytest.mark.req("FS-2")
def test_into_a_directory_the_name_is_the_one_that_was_typed(files, cloche, tmp_path) -> None:
    assert cloche("cp", "lab:/tmp/x", str(tmp_path)).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_file_goes_into_a_directory_or_becomes_the_target(files, cloche, tmp_path) -> None:
    source = tmp_path / "a.txt"
    source.write_bytes(b"here")
    assert cloche("cp", str(source), "lab:/folder").exit_code == 0
    assert cloche("cp", str(source), "lab:/new.txt").exit_code == 0
    assert files.written == {"/folder/a.txt": b"here", "/new.txt": b"here"}


def test_each_file_that_failed_is_told_and_escaped(files, cloche, tmp_path) -> None:
    files.result = TreeResult(
        files=1, errors=[FileError(path="a\x1b]52;c;x\x07", code="invalid_path", message="no")], errors_more=2
    )
    result = cloche("cp", "lab:/folder", str(tmp_path / "out"))
    assert result.exit_code == 1
    assert result.stderr == "✗ invalid_path: a\\x1b]52;c;x\\x07: no\n  and 2 more\n"


@pytest.mark.parametrize("sides", [("a", "b"), ("x:/a", "y:/b")])
def test_one_side_is_inside_and_one_is_here(node, cloche, sides) -> None:
    assert cloche("cp", *sides).exit_code == 2


def test_a_missing_local_file_is_named(files, cloche, tmp_path) -> None:
    result = cloche("cp", str(tmp_path / "none"), "lab:/x")
    assert result.exit_code == 1
    assert result.stderr.startswith("✗ path_not_found: ")


def test_ports() -> None:
    assert port.parse("8000") == (8000, 8000)
    assert port.parse("8000:0") == (8000, 0)
    for text in ("x", "0", "70000", "1:99999", "8000:"):
        with pytest.raises(click.UsageError):
            port.parse(text)
