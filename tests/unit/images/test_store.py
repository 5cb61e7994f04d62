"""The store itself: its lock, its form, what it removes at a start and what it never does."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images import blobs
from cloche_server.images.layout import PUBLIC, Layout, digest_of, hex_of, root_key
from cloche_server.images.store import Store
from tests.unit.images.pushing import sha256

pytestmark = pytest.mark.req("IMG-3")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "images")


def test_its_lock_is_given_back(tmp_path: Path, store: Store) -> None:
    with pytest.raises(ClocheError) as busy:
        Store.open(tmp_path / "images")
    assert busy.value.code == "store_busy"
    store.close()
    Store.open(tmp_path / "images").close()


def test_a_newer_form_is_refused(tmp_path: Path, store: Store) -> None:
    store.close()
    (tmp_path / "images" / "format").write_text("2\n")
    with pytest.raises(ClocheError) as new:
        Store.open(tmp_path / "images")
    assert new.value.code == "state_too_new"
    (tmp_path / "images" / "format").write_text("1\n")
    Store.open(tmp_path / "images").close()


def test_what_is_unfinished_goes_and_links_are_not_followed(tmp_path: Path, store: Store) -> None:
    store.close()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    here = Layout(tmp_path / "images")
    (here.tmp / "directory").mkdir()
    (here.tmp / "directory" / "file").write_text("x")
    os.symlink(outside, here.tmp / "link")
    os.symlink(outside / "file", here.partial / ("1" * 64))
    (here.partial / ("2" * 64)).write_text("half")
    Store.open(tmp_path / "images").close()
    assert sorted(path.name for path in here.tmp.iterdir()) == ["partial"]
    assert [path.name for path in here.partial.iterdir()] == ["2" * 64]
    assert (outside / "file").read_text() == "mine"


async def test_blobs_that_nothing_refers_to_go_at_the_next_start(tmp_path: Path, store: Store) -> None:
    digest = await blobs.put_bytes(store, b"data", PUBLIC)
    assert store.has_blob(digest, "uid:1")
    assert store.unreferenced_blobs() == [hex_of(digest)]
    with store.holding([digest]):
        assert store.unreferenced_blobs() == []
    store.close()
    again = Store.open(tmp_path / "images")
    assert not again.has_blob(digest, PUBLIC)
    again.close()


async def test_a_blob_is_only_for_who_brought_it(store: Store) -> None:
    digest = await blobs.put_bytes(store, b"data", "uid:1")
    assert [store.has_blob(digest, scope) for scope in ("uid:1", "uid:2", PUBLIC)] == [True, False, False]
    await blobs.put_bytes(store, b"data", "uid:2")
    assert store.has_blob(digest, "uid:2")
    assert stat.S_IMODE(store.layout.blob(digest).stat().st_mode) == 0o444
    store.close()


async def test_a_file_becomes_a_blob_by_link_or_by_copy(tmp_path: Path, store: Store) -> None:
    fd = store.layout.scratch()
    os.write(fd, b"ours")
    assert await blobs.put_file(store, fd, PUBLIC) == (sha256(b"ours"), 4)
    assert os.fstat(fd).st_nlink == 1, "it was published itself"
    os.close(fd)
    (tmp_path / "theirs").write_bytes(b"theirs")
    fd = os.open(tmp_path / "theirs", os.O_RDONLY)
    unlinked = os.open(tmp_path / "unlinked", os.O_RDWR | os.O_CREAT)
    os.unlink(tmp_path / "unlinked")
    os.write(unlinked, b"unlinked")
    for each, data in ((fd, b"theirs"), (unlinked, b"unlinked")):
        digest, _ = await blobs.put_file(store, each, PUBLIC)
        assert store.layout.blob(digest).read_bytes() == data
        os.close(each)
    (tmp_path / "theirs").write_bytes(b"changed")
    assert store.layout.blob(sha256(b"theirs")).read_bytes() == b"theirs"
    store.close()


async def test_a_part_of_a_file_becomes_a_blob(tmp_path: Path, store: Store) -> None:
    (tmp_path / "archive").write_bytes(b"headBODYtail")
    fd = os.open(tmp_path / "archive", os.O_RDONLY)
    assert await blobs.copy_range(store, fd, 4, 4, PUBLIC, sha256(b"BODY")) == sha256(b"BODY")
    for offset, size, expected in ((4, 4, sha256(b"other")), (8, 100, None)):
        with pytest.raises(ClocheError) as corrupt:
            await blobs.copy_range(store, fd, offset, size, PUBLIC, expected)
        assert corrupt.value.code == "image_corrupt"
    assert len(list(store.layout.blobs.iterdir())) == 1
    os.close(fd)
    store.close()


def test_names_are_never_paths(store: Store) -> None:
    for digest in ("sha256:../../etc/passwd", "sha512:" + "0" * 128, "sha256:" + "A" * 64, ""):
        with pytest.raises(ClocheError) as refused:
            store.layout.blob(digest)
        assert refused.value.code == "image_refused"
    store.close()


def test_a_roots_key_depends_on_all_that_makes_it() -> None:
    one, two = digest_of(b"1"), digest_of(b"2")
    keys = [
        root_key([one, two], "c", "a"),
        root_key([two, one], "c", "a"),
        root_key([one], "c", "a"),
        root_key([one, two], "d", "a"),
        root_key([one, two], "c", "b"),
        root_key([], "c", "a"),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == root_key([one, two], "c", "a")
