"""Every row of the hostile table against the real converter, and again with its defence switched off."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.unit.images import converter
from tests.unit.images.erofs import Erofs, Inode, told
from tests.unit.images.hostile import MIB, TABLE, Row

OUTPUT_MORE_BYTES_MAX = 64 * MIB


def _told(image: Erofs, inode: Inode) -> str:
    special = inode.mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX)
    return told(image, inode) + (f"@{stat.S_IMODE(inode.mode):o}" if special else "")


def _listing(directory: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_nlink for path in directory.rglob("*") if not path.is_dir()}


def check(row: Row, directory: Path, **options: Any) -> None:
    """What the row promises: the answer, the tree, bounded memory and disk, and nothing written elsewhere."""
    place = directory / "a/b/c"
    place.mkdir(parents=True)
    (directory / "canary").write_bytes(b"canary")
    agent = directory / "agent"
    agent.write_bytes(b"AGENT")
    layers = row.make(directory)
    output, scratch = directory / "output", directory / "scratch"
    with output.open("w+b") as opened, scratch.open("w+b") as raw:
        before = _listing(directory)
        ended = converter.image(
            layers, opened, raw, limits=row.limits, agent=agent if row.with_agent else None, cwd=place, **options
        )
    assert ended.status == 0, ended.log
    assert _listing(directory) == before, "something was written to the host"
    limits = converter.LIMITS | row.limits
    assert scratch.stat().st_size <= limits["raw_bytes"]
    assert output.stat().st_size <= scratch.stat().st_size + OUTPUT_MORE_BYTES_MAX
    if isinstance(row.expect, str):
        assert ended.refused is not None, "it was accepted"
        assert ended.code == row.expect, ended.refused
        return
    assert ended.done is not None, ended.refused
    assert ended.done["root_bytes"] == output.stat().st_size
    for name, count in row.lost.items():
        assert ended.done["lost"][name] == count, ended.done["lost"]
    image = Erofs(output)
    tree = image.tree()
    assert all(inode.xattrs == 0 for inode in tree.values()), "gVisor cannot open an inode with xattrs"
    found = {path: _told(image, inode) for path, inode in tree.items() if path}
    assert found == (row.expect(directory) if callable(row.expect) else row.expect)


def test_the_table_is_whole() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE) >= 40
    assert all(row.defences for row in TABLE)


@pytest.mark.req("IMG-2")
@pytest.mark.req("ISO-3")
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_hostile_archive(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)


@pytest.mark.parametrize(
    ("row", "defence"),
    [pytest.param(row, defence, id=f"{row.name}-{defence}") for row in TABLE for defence in row.defences],
)
def test_without_its_defence_the_row_fails(row: Row, defence: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(row, tmp_path, program=converter.planted_program(), planted=defence)


def test_the_planted_binary_is_otherwise_the_same(tmp_path: Path) -> None:
    """Else a defect that is noticed says nothing about the shipped binary."""
    (row,) = [row for row in TABLE if row.name == "gzip members"]
    check(row, tmp_path, program=converter.planted_program(), planted="none")


def test_the_shipped_binary_does_not_listen(tmp_path: Path) -> None:
    (row,) = [row for row in TABLE if row.name == "dot-dot name"]
    check(row, tmp_path, planted="dotdot")
    assert b"CLOCHE_CONVERT_PLANTED" not in converter.CONVERTER.read_bytes()
    assert os.access(converter.CONVERTER, os.X_OK)
