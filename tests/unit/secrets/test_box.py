"""What is sealed opens only with its key, in its own place."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.secrets.box import SEALED, Box, about, make_key

MINE = about("secret", "t", "uid:1", "TOKEN")


def make(base: Path) -> Box:
    return Box(base / "config" / "secrets.key", base / "state" / "key.id")


def refused(box: Box, sealed: bytes, what: bytes = MINE) -> str:
    with pytest.raises(ClocheError) as raised:
        box.open(sealed, what, name="TOKEN")
    assert raised.value.code == "secret_unavailable"
    assert raised.value.detail == {"secret": "TOKEN"}
    return raised.value.message


@pytest.mark.req("SEC-1")
def test_what_is_sealed_opens_again_and_shows_nothing(tmp_path: Path) -> None:
    sealed = make(tmp_path).seal(b"planted value", MINE)
    assert b"planted" not in sealed
    assert make(tmp_path).open(sealed, MINE) == b"planted value", "also by the next daemon"
    assert make(tmp_path).seal(b"planted value", MINE) != sealed, "two seals of one value look alike"


def test_the_key_is_for_its_owner_alone_and_outside_the_data(tmp_path: Path) -> None:
    make(tmp_path).seal(b"x", MINE)
    key = tmp_path / "config" / "secrets.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    data = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())
    assert key.read_bytes() not in data
    assert key.read_bytes().hex().encode() not in data
    assert [path.name for path in key.parent.iterdir()] == ["secrets.key"], "nothing half made is left"


@pytest.mark.req("SEC-1")
def test_a_copied_data_directory_does_not_open(tmp_path: Path) -> None:
    sealed = make(tmp_path).seal(b"planted value", MINE)
    (tmp_path / "state").rename(tmp_path / "copied")
    thief = Box(tmp_path / "other" / "secrets.key", tmp_path / "copied" / "key.id")
    assert "missing" in refused(thief, sealed)
    with pytest.raises(ClocheError, match="missing"):
        thief.seal(b"new", MINE)
    assert not (tmp_path / "other" / "secrets.key").exists(), "a new key beside what another one sealed"


def test_no_new_key_beside_sealed_files_even_without_their_mark(tmp_path: Path) -> None:
    box = make(tmp_path)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / f"one{SEALED}").write_bytes(box.seal(b"x", MINE))
    (tmp_path / "state" / "key.id").unlink()
    (tmp_path / "config" / "secrets.key").unlink()
    with pytest.raises(ClocheError, match="missing"):
        make(tmp_path).seal(b"new", MINE)
    assert not (tmp_path / "config" / "secrets.key").exists()


def test_another_key_is_named_as_such(tmp_path: Path) -> None:
    sealed = make(tmp_path).seal(b"x", MINE)
    (tmp_path / "config" / "secrets.key").unlink()
    make_key(tmp_path / "config" / "secrets.key")
    assert "is not the key" in refused(make(tmp_path), sealed)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    sealed = make(tmp_path).seal(b"x", MINE)
    (tmp_path / "config" / "secrets.key").write_bytes(content)
    assert "does not hold a key" in refused(make(tmp_path), sealed)


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    sealed = make(tmp_path).seal(b"x", MINE)
    (tmp_path / "config" / "secrets.key").chmod(0o640)
    assert "open to other users" in refused(make(tmp_path), sealed)


def test_it_opens_only_for_what_it_was_sealed_for(tmp_path: Path) -> None:
    box = make(tmp_path)
    sealed = box.seal(b"x", MINE)
    for other in (
        about("secret", "t", "uid:2", "TOKEN"),
        about("secret", "t", "uid:1", "OTHER"),
        about("secret", "tuid:1", "", "TOKEN"),
    ):
        assert "does not open" in refused(box, sealed, other)


def test_every_changed_byte_and_every_cut_is_seen(tmp_path: Path) -> None:
    box = make(tmp_path)
    sealed = box.seal(b"planted value", MINE)
    for position in range(len(sealed)):
        broken = bytearray(sealed)
        broken[position] ^= 1
        refused(box, bytes(broken))
        refused(box, sealed[:position])
    refused(box, sealed + b"x")


def test_who_makes_a_key_second_takes_the_first(tmp_path: Path) -> None:
    path = tmp_path / "config" / "secrets.key"
    assert make_key(path, uid=os.getuid(), gid=os.getgid())
    first = path.read_bytes()
    assert not make_key(path)
    assert path.read_bytes() == first


def test_parts_cannot_be_shifted() -> None:
    assert about("a", "bc") != about("ab", "c")
    assert about("a") != about("a", "")
