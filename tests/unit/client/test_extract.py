"""A guest's tree is written below its place and nowhere else."""

from __future__ import annotations

import hashlib
import os
import random
import stat
import tarfile
from pathlib import Path

import pytest

from cloche.client._extract import Extractor
from cloche.client._pack import Packer
from cloche.client._placing import stays_inside
from cloche.wire.errors import ClocheError
from cloche.wire.files import TreeResult
from tests.unit.client.hostile_trees import (
    BROKEN,
    OUT,
    TREES,
    entry,
    gzip_bomb_free_stream,
    hardlink,
    patched,
    result,
    symlink,
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A destination with things of the user's in it, and a neighbour that must not change."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    place = tmp_path / "place"
    place.mkdir()
    (place / "mine").write_text("mine")
    (place / "mydir").mkdir()
    (place / "mylink").symlink_to(outside)
    return place


def picture(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else os.readlink(path) if path.is_symlink() else ""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_uid, status.st_nlink, content)
    return found


def extract(place: Path, tar: bytes, *, piece: int = 1000, overwrite: bool = True) -> TreeResult:
    tar = rewritten(tar, str(place.parent / "outside"))
    with Extractor(place, overwrite=overwrite) as extractor:
        for low in range(0, len(tar), piece):
            extractor.feed(tar[low : low + piece])
        return extractor.finish()


def rewritten(tar: bytes, outside: str) -> bytes:
    """OUT stands for an absolute path that is only known now; put in where a header or record holds it."""
    if OUT.encode() not in tar:
        return tar
    made = b""
    at = 0
    while at < len(tar):
        header = tar[at : at + 512]
        if not any(header):
            return made + tar[at:]
        info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        content = tar[at + 512 : at + 512 + info.size]
        at += 512 + -(-info.size // 512) * 512
        if info.type in (tarfile.XHDTYPE, b"L", b"K"):
            content = _renumbered(content.replace(OUT.encode(), outside.encode()), info.type)
        info.name, info.linkname = info.name.replace(OUT, outside), info.linkname.replace(OUT, outside)
        info.size = len(content)
        made += info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)
    return made


def _renumbered(content: bytes, kind: bytes) -> bytes:
    if kind != tarfile.XHDTYPE:
        return content
    plain = b" " + content.split(b" ", 1)[1]
    length = len(plain) + len(str(len(plain) + 3))
    return str(length).encode() + plain


def test_there_are_enough_mechanisms() -> None:
    assert len(TREES) >= 40


@pytest.mark.req("FS-2")
@pytest.mark.parametrize("name", TREES)
def test_nothing_outside_its_place(name: str, place: Path) -> None:
    before = picture(place.parent / "outside")
    beside = sorted(entry.name for entry in place.parent.iterdir())
    mine = (place / "mine").stat()
    report = extract(place, TREES[name])
    assert picture(place.parent / "outside") == before
    assert sorted(entry.name for entry in place.parent.iterdir()) == beside
    assert (place / "mine").read_text() == "mine"
    assert (place / "mine").stat().st_nlink == mine.st_nlink == 1
    check_inside(place)
    for one in report.errors:
        assert one.path.isprintable(), one
        assert one.message.isprintable(), one


def check_inside(place: Path) -> None:
    root = os.path.realpath(place)
    for path in place.rglob("*"):
        status = path.lstat()
        assert not status.st_mode & 0o7000 or stat.S_ISLNK(status.st_mode), path
        assert stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or path.is_symlink(), path
        assert not path.name.endswith(".part"), path
        if path.is_symlink() and path.name != "mylink":
            assert os.path.realpath(path).startswith(root + "/") or os.path.realpath(path) == root, path


@pytest.mark.req("FS-2")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_archive_is_an_error_and_leaves_no_half_file(name: str, place: Path) -> None:
    before = picture(place.parent / "outside")
    with pytest.raises(ClocheError) as raised:
        extract(place, BROKEN[name])
    assert raised.value.code == "transfer_aborted"
    assert picture(place.parent / "outside") == before
    assert not [path for path in place.rglob("*") if path.name.endswith(".part")]


@pytest.mark.req("FS-2")
def test_what_each_refusal_is_called(place: Path) -> None:
    tar = (
        entry("/abs", data=b"x")
        + entry("../x", data=b"x")
        + symlink("l", "/etc")
        + hardlink("h", "mine")
        + entry("d", tarfile.CHRTYPE)
    )
    report = extract(place, tar + entry("good", data=b"good") + result())
    assert [(one.path, one.code) for one in report.errors] == [
        ("/abs", "invalid_path"),
        ("../x", "invalid_path"),
        ("l", "invalid_path"),
        ("h", "invalid_path"),
        ("d", "unsupported"),
    ]
    assert (place / "good").read_text() == "good"
    assert report.files == 1


@pytest.mark.req("FS-2")
def test_any_split_of_the_stream_gives_the_same(place: Path, seed: int) -> None:
    tar = (
        entry("d", tarfile.DIRTYPE, mode=0o555)
        + entry("d/f", data=b"f" * 1300)
        + symlink("d/l", "f")
        + hardlink("h", "d/f")
        + result()
    )
    dice = random.Random(seed)
    for piece in (1, 511, 512, 513, dice.randint(2, 3000), len(tar)):
        folder = place / str(piece)
        folder.mkdir()
        report = extract(folder, tar, piece=piece)
        assert not report.errors
        assert (folder / "d" / "l").read_bytes() == b"f" * 1300
        assert (folder / "h").stat().st_ino == (folder / "d" / "f").stat().st_ino
        assert stat.S_IMODE((folder / "d").stat().st_mode) == 0o755
        assert (folder / "d" / "f").stat().st_mtime == 1_000_000_000


@pytest.mark.req("FS-2")
def test_overwriting_replaces_a_file_and_never_writes_into_one(place: Path) -> None:
    os.link(place / "mine", place.parent / "outside" / "same")
    report = extract(place, entry("mine", data=b"new") + result())
    assert not report.errors
    assert (place / "mine").read_text() == "new"
    assert (place.parent / "outside" / "same").read_text() == "mine"
    refused = extract(place, entry("mine", data=b"again") + result(), overwrite=False)
    assert [one.code for one in refused.errors] == ["path_exists"]
    assert (place / "mine").read_text() == "new"


@pytest.mark.req("FS-2")
def test_limits(place: Path) -> None:
    tar = gzip_bomb_free_stream(50)
    for bytes_max, entries_max in ((1000, 100), (100_000, 10)):
        with (
            Extractor(place, bytes_max=bytes_max, entries_max=entries_max) as extractor,
            pytest.raises(ClocheError) as raised,
        ):
            extractor.feed(tar)
        assert raised.value.code == "too_large"
    endless = patched(entry("a"), 124, b"77777777777\0")
    with Extractor(place, bytes_max=10_000) as extractor, pytest.raises(ClocheError):
        extractor.feed(endless + bytes(20_000))
    assert not (place / "a").exists()


def test_links_that_stay_inside() -> None:
    assert stays_inside("a", 0)
    assert stays_inside("../a", 1)
    assert stays_inside("../../a/b", 2)
    assert not stays_inside("..", 0)
    assert not stays_inside("../..", 1)
    assert not stays_inside("a/..", 5)
    assert not stays_inside("/a", 5)
    assert not stays_inside("", 5)


@pytest.mark.req("FS-2")
def test_a_tree_goes_out_and_comes_back(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep" / "er").mkdir(parents=True)
    target.mkdir()
    for number in range(60):
        (source / "deep" / f"{number}-é").write_bytes(dice.randbytes(dice.randint(0, 3000)))
    (source / "large").write_bytes(dice.randbytes(700_000))
    (source / ("n" * 200)).write_text("long")
    (source / "link").symlink_to("large")
    os.mkfifo(source / "pipe")
    packer = Packer(source)
    tar = b"".join(packer.blocks())
    report = extract(target, tar[:-1024] + result())
    assert [(one.path, one.code) for one in packer.errors] == [("pipe", "unsupported")]
    assert not report.errors
    (source / "pipe").unlink()
    assert digest(source) == digest(target)


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
