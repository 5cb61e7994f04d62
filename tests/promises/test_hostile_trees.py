"""Hostile trees copied out of a sandbox write nothing outside their place."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from tests.promises.evil import EvilImages
from tests.promises.hostile import (
    FULL_TIMEOUT_S,
    SMALL,
)
from tests.promises.nodes import RealNode
from tests.unit.client.hostile_trees import BROKEN as BROKEN_TREES
from tests.unit.client.hostile_trees import TREES
from tests.unit.client.test_extract import picture, rewritten

# ---------------------------------------------------------------- trees out


def prepare(place: Path) -> None:
    """A destination with things of the user's in it, and a neighbour that must not change."""
    shutil.rmtree(place, ignore_errors=True)
    outside = place.parent / "outside"
    if not outside.exists():
        outside.mkdir()
        (outside / "secret").write_text("secret")
    place.mkdir()
    (place / "mine").write_text("mine")
    (place / "mydir").mkdir()
    (place / "mylink").symlink_to(outside)


@pytest.mark.req("FS-2")
@pytest.mark.timeout(FULL_TIMEOUT_S)
def test_hostile_trees_write_nothing_outside_their_place(
    evil_node: RealNode, evil_image: EvilImages, tmp_path: Path, seed: int, long_run: bool
) -> None:
    place = tmp_path / "place"
    prepare(place)
    trees = {**TREES, **BROKEN_TREES}
    assert len(trees) >= 40
    entry = {"name": "t", "path": "/t", "type": "dir", "size": 0, "mode": 0o755, "uid": 0, "gid": 0, "mtime_ns": 0}
    files = {".cloche/answers/fs.stat.end": json.dumps({"ok": {"entry": entry}}).encode()}
    for number, tar in enumerate(trees.values()):
        files[f"t/{number}"] = rewritten(tar, str(tmp_path / "outside"))
    before = picture(tmp_path / "outside")
    by_command = set(range(len(trees)) if long_run else random.Random(seed).sample(range(len(trees)), 6))
    written = 0
    with evil_node.sandbox(image=evil_image("serve", files), name="trees", **SMALL) as box:
        for number, name in enumerate(trees):
            prepare(place)
            if number in by_command:
                done = evil_node.cloche("cp", f"trees:/t/{number}/.", str(place))
                assert done.returncode in (0, 1, 125), (name, done)
                assert b"\x1b" not in done.stderr, (name, done.stderr)
                assert b"Traceback" not in done.stderr, (name, done.stderr)
            else:
                said = ""
                try:
                    box.files.download(f"/t/{number}", place)
                except ClocheError as refused:
                    said = str(refused)
                assert "\x1b" not in said, name
            assert picture(tmp_path / "outside") == before, name
            assert sorted(os.listdir(tmp_path)) == ["outside", "place"], name
            assert stat.S_IMODE((place.stat()).st_mode) & 0o700 == 0o700, name
            for path in place.rglob("*"):
                status = path.lstat()
                assert not status.st_mode & 0o6000 or stat.S_ISLNK(status.st_mode), (name, path)
                assert stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK), (name, path)
                if path.is_symlink() and path.name != "mylink":
                    assert Path(os.path.realpath(path)).is_relative_to(os.path.realpath(place)), (
                        name,
                        os.readlink(path),
                    )
                written += 1
        assert box.run(["ok"]).stdout == "ok\n", "and the channel goes on"
    print(f"\n{len(trees)} hostile trees, {len(by_command)} by `cloche cp`: nothing outside; {written} entries inside")
