"""fsck finds each kind of damage by name, and repairs it so that the next check finds nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cloche_server.images.build.protocols import Cached, LayerRef
from cloche_server.images.layout import Layout
from cloche_server.images.service import Images
from tests.unit.images.plain_parts import HOST, MemoryRegistry, open_images
from tests.unit.images.pushing import gzipped, sha256, tar_of

NAME = f"{HOST}/team/app:1"
OTHER = f"{HOST}/team/other:1"
OWNER = "uid:1"

pytestmark = pytest.mark.req("IMG-3")


def registry() -> MemoryRegistry:
    here = MemoryRegistry()
    here.add(NAME, [tar_of({"common": b"c" * 5000}), tar_of({"a": b"a"})])
    here.add(OTHER, [tar_of({"other": b"o"})])
    return here


async def opened(directory: Path) -> Images:
    images = await open_images(directory, registry())
    await images.ensure(NAME, owner=OWNER)
    await images.ensure(OTHER, owner=OWNER)
    return images


def flip(path: Path) -> None:
    """One bit in the middle; length and mode stay."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    mode = path.stat().st_mode
    path.chmod(0o600)
    path.write_bytes(data)
    path.chmod(mode)


def shorten(path: Path) -> None:
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1])
    path.chmod(0o444)


def layer(images: Images) -> str:
    return images.find(NAME, OWNER).layers[0].digest


Damage = Callable[[Layout, Images], None]
DAMAGE: dict[str, tuple[Damage, str, bool]] = {
    "a flipped bit in a layer": (lambda here, images: flip(here.blob(layer(images))), "another hash", False),
    "a layer cut short": (lambda here, images: shorten(here.blob(layer(images))), "bytes, not", False),
    "a flipped bit in a manifest": (
        lambda here, images: flip(here.blob(images.find(NAME, OWNER).digest)),
        "another hash",
        False,
    ),
    "a flipped bit in a root": (
        lambda here, images: flip(here.root_file(str(images.find(NAME, OWNER).root))),
        "another hash",
        True,
    ),
    "a missing layer": (lambda here, images: here.blob(layer(images)).unlink(), "missing", False),
    "a missing config": (lambda here, images: here.blob(images.find(NAME, OWNER).config).unlink(), "missing", False),
    "a missing root": (
        lambda here, images: here.root_file(str(images.find(NAME, OWNER).root)).unlink(),
        "missing",
        True,
    ),
    "a root without its record": (
        lambda here, images: here.root_record(str(images.find(NAME, OWNER).root)).unlink(),
        "nothing is known",
        True,
    ),
    "a record that is no JSON": (
        lambda here, images: here.image(images.find(NAME, OWNER).digest).write_bytes(b"{"),
        "cannot be read",
        False,
    ),
    "a missing record": (
        lambda here, images: here.image(images.find(NAME, OWNER).digest).unlink(),
        "the record is gone",
        False,
    ),
    "a record that says something else than the manifest": (
        lambda here, images: images._store.images.__setitem__(
            (found := images.find(NAME, OWNER)).digest, type(found)(**{**fields(found), "layers": found.layers[:1]})
        ),
        "something else than its manifest",
        False,
    ),
    "a name of nothing": (
        lambda here, images: next(iter(here.names.iterdir())).rename(here.names / ("0" * 64 + ".json")),
        "another name",
        True,
    ),
    "an orphan blob": (lambda here, images: orphan(here.blobs / ("1" * 64)), "another hash", True),
    "an orphan root": (lambda here, images: orphan(here.roots / ("1" * 64 + ".erofs")), "nothing refers", True),
    "a foreign file": (lambda here, images: orphan(here.blobs / "README"), "not a part", True),
    "a foreign directory": (lambda here, images: (here.images / "sub").mkdir(), "not a part", True),
    "a link": (lambda here, images: os.symlink("/etc/passwd", here.blobs / ("2" * 64)), "not a part", True),
    "something in tmp": (lambda here, images: orphan(here.tmp / "rubbish"), "unfinished", True),
    "a foreign partial": (lambda here, images: orphan(here.partial / "rubbish"), "not a partial", True),
    "a writable blob": (lambda here, images: here.blob(layer(images)).chmod(0o644), "mode is 0644", True),
    "an open directory": (lambda here, images: here.blobs.chmod(0o755), "mode is 0755", True),
}


def fields(record: object) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}  # type: ignore[attr-defined]


def orphan(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0o444)


@pytest.mark.parametrize("what", DAMAGE)
async def test_damage_is_found_and_repaired(tmp_path: Path, what: str) -> None:
    damage, text, stays = DAMAGE[what]
    images = await opened(tmp_path)
    assert (await images.fsck()).problems == []
    damage(Layout(tmp_path / "images"), images)
    found = await images.fsck()
    assert any(text in problem.what for problem in found.problems), found.problems
    assert not any(problem.repaired for problem in found.problems)
    assert [problem.what for problem in (await images.fsck()).problems] == [each.what for each in found.problems]
    mended = await images.fsck(repair=True)
    assert all(problem.repaired for problem in mended.problems)
    assert (await images.fsck()).problems == []
    names = {name for view in images.list(OWNER) for name in view.names}
    assert OTHER in names or what == "a name of nothing"
    assert stays == (len(images.list(OWNER)) == 2)
    root = await images.ensure(NAME, owner=OWNER)
    assert (tmp_path / "images" / root.file).read_bytes().startswith(b"ROOT")
    assert (await images.fsck()).problems == []
    await images.close()


async def test_a_foreign_file_beside_the_store_is_named_and_left(tmp_path: Path) -> None:
    images = await opened(tmp_path)
    (tmp_path / "images" / "notes.txt").write_text("mine")
    found = await images.fsck(repair=True)
    assert [(problem.path, problem.repaired) for problem in found.problems] == [("notes.txt", False)]
    assert (tmp_path / "images" / "notes.txt").read_text() == "mine"
    await images.close()


async def test_the_report_counts_what_it_looked_at(tmp_path: Path) -> None:
    images = await opened(tmp_path)
    report = await images.fsck()
    assert (report.images, report.roots, report.blobs) == (2, 2, 7)
    assert report.bytes == images.size_bytes()
    await images.close()


async def test_a_damaged_record_costs_no_blob_at_the_next_start(tmp_path: Path) -> None:
    """What cannot be read may refer to anything: nothing is removed for want of a reference."""
    images = await opened(tmp_path)
    here = Layout(tmp_path / "images")
    before = sorted(path.name for path in here.blobs.iterdir())
    here.image(images.find(NAME, OWNER).digest).write_bytes(b"{")
    await images.close()
    images = await open_images(tmp_path, registry())
    assert sorted(path.name for path in here.blobs.iterdir()) == before
    assert any("cannot be read" in problem.what for problem in (await images.fsck()).problems)
    await images.fsck(repair=True)
    assert (await images.fsck(repair=True)).problems == []
    await images.close()


async def test_a_step_that_lost_its_layer_is_forgotten(tmp_path: Path) -> None:
    images = await opened(tmp_path)
    raw = tar_of({"step": b"s"})
    async with images.shelf(OWNER) as shelf:
        fd = shelf.temporary()
        os.write(fd, gzipped(raw))
        made = await shelf.put_layer(fd, digest=sha256(gzipped(raw)), diff_id=sha256(raw), size=len(gzipped(raw)))
        os.close(fd)
        await shelf.put("key", Cached((LayerRef(made.digest, made.diff_id, made.size),), "2024"))
        assert await shelf.get("key") is not None
    assert (await images.fsck()).problems == []
    Layout(tmp_path / "images").blob(made.digest).unlink()
    assert ["step is missing" in each.what for each in (await images.fsck(repair=True)).problems] == [True]
    assert (await images.fsck()).problems == []
    await images.close()
