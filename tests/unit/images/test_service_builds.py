"""The store as a build sees it: layers and steps in, an image out, the same bytes for the same work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images.build.protocols import BuildCache, Cached, LayerRef, Shelf
from cloche_server.images.building import Shelf as StoreShelf
from cloche_server.images.layout import Layout
from cloche_server.images.service import Images
from cloche_server.images.trust import TrustPolicy
from tests.unit.images.plain_parts import HOST, Clock, MemoryRegistry, PlainConverter, left_in_tmp, open_images
from tests.unit.images.pushing import gzipped, sha256, tar_of

OWNER = "uid:1"
BASE, BUILT = f"{HOST}/base:1", f"{HOST}/built:1"

pytestmark = pytest.mark.req("IMG-2")


def registry() -> MemoryRegistry:
    here = MemoryRegistry()
    here.add(BASE, [tar_of({"base": b"b" * 2000})])
    return here


async def put(shelf: StoreShelf, raw: bytes) -> LayerRef:
    fd, packed = shelf.temporary(), gzipped(raw)
    try:
        os.write(fd, packed)
        return await shelf.put_layer(fd, digest=sha256(packed), diff_id=sha256(raw), size=len(packed))
    finally:
        os.close(fd)


def protocols(shelf: StoreShelf) -> tuple[Shelf, BuildCache]:
    """mypy sees that it is both."""
    return shelf, shelf


async def build(images: Images, name: str | None = BUILT, **config: Any) -> str:
    async with images.shelf(OWNER) as shelf:
        base = await shelf.base(BASE)
        layer = await put(shelf, tar_of({"made": b"m"}))
        root = await shelf.root([*base.layers, layer])
        assert (images._store.layout.root / root).is_file()
        wanted = {**base.config, "config": {**base.config["config"], **config}}
        return (await shelf.commit([*base.layers, layer], wanted, name)).digest


async def test_a_build_becomes_an_image_of_its_owner(tmp_path: Path) -> None:
    converter = PlainConverter()
    images = await open_images(tmp_path, registry(), converter)
    digest = await build(images, User="3", Cmd=["/made"])
    view = images.inspect(BUILT, OWNER)
    assert (view.digest, view.source, view.private, view.layers) == (digest, "build", True, 2)
    root = await images.ensure(BUILT, owner=OWNER, pull="never")
    assert (root.digest, root.user, root.cmd, root.env) == (digest, "3", ("/made",), {"PATH": "/bin", "A": "b"})
    with pytest.raises(ClocheError):
        images.inspect(BUILT, "uid:2")
    assert len(converter.made) == 2, "the base, and the last step's root is the image's"
    assert (await images.fsck()).problems == []
    assert left_in_tmp(tmp_path) == []
    await images.close()


async def test_the_same_build_has_the_same_digest_everywhere(tmp_path: Path) -> None:
    digests = set()
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        images = await open_images(tmp_path / str(number), registry())
        more = {"Labels": {"a": "1", "b": "2"}} if number else {"Labels": {"b": "2", "a": "1"}}
        digests.add(await build(images, **more))
        assert await build(images, **more) in digests
        await images.close()
    assert len(digests) == 1


async def test_an_image_of_layers_alone(tmp_path: Path) -> None:
    images = await open_images(tmp_path)
    async with images.shelf(OWNER) as shelf:
        layer = await put(shelf, tar_of({"hello": b"h"}))
        view = await images.commit([layer], {"config": {"Cmd": ["/hello"]}}, BUILT, owner=OWNER)
        with pytest.raises(ClocheError) as missing:
            await images.commit([layer], {}, BUILT, owner="uid:2")
        assert missing.value.code == "image_corrupt", "a digest is no proof"
    assert (view.names, view.config.cmd) == ([BUILT], ["/hello"])
    assert (await images.fsck()).problems == []
    await images.close()


async def test_the_empty_root_is_nobodys_and_no_orphan(tmp_path: Path) -> None:
    images = await open_images(tmp_path, clock=(clock := Clock()))
    file = tmp_path / "images" / await images.empty_root()
    clock.now += 3600
    assert (await images.fsck()).problems == []
    assert file.is_file()
    assert (await images.gc()).roots == 1
    assert not file.exists()
    assert (tmp_path / "images" / await images.empty_root()) == file
    await images.close()


async def test_what_a_failed_build_leaves_goes_with_it(tmp_path: Path) -> None:
    images = await open_images(tmp_path, registry())
    here = Layout(tmp_path / "images")
    await images.ensure(BASE, owner=OWNER)
    before = sorted(str(path) for path in (tmp_path / "images").rglob("*") if path.is_file())

    async def fails() -> None:
        async with images.shelf(OWNER) as shelf:
            base = await shelf.base(BASE)
            layer = await put(shelf, tar_of({"made": b"m"}))
            await shelf.root([*base.layers, layer])
            assert here.blob(layer.digest).is_file()
            raise RuntimeError("planned")

    with pytest.raises(RuntimeError, match="planned"):
        await fails()
    assert sorted(str(path) for path in (tmp_path / "images").rglob("*") if path.is_file()) == before
    await images.close()


async def test_steps_are_remembered_over_a_restart_for_their_owner(tmp_path: Path) -> None:
    images = await open_images(tmp_path, registry())
    async with images.shelf(OWNER) as shelf:
        layer = await put(shelf, tar_of({"made": b"m"}))
        await shelf.put("a" * 64, Cached((layer,), "2024-01-01T00:00:00Z"))
    await images.close()
    images = await open_images(tmp_path, registry())
    assert (await images.fsck()).problems == []
    async with images.shelf(OWNER) as shelf:
        _, cache = protocols(shelf)
        assert await cache.get("a" * 64) == Cached((layer,), "2024-01-01T00:00:00Z")
        assert await cache.get("b" * 64) is None
        base = await shelf.base(BASE)
        assert (await shelf.commit([*base.layers, layer], base.config, BUILT)).layers == 2
    async with images.shelf("uid:2") as shelf:
        assert await shelf.get("a" * 64) is None
    await images.close()


async def test_a_layer_that_is_not_what_it_is_said_to_be_is_refused(tmp_path: Path) -> None:
    images = await open_images(tmp_path, registry())
    raw = tar_of({"made": b"m"})
    async with images.shelf(OWNER) as shelf:
        fd = shelf.temporary()
        os.write(fd, gzipped(raw))
        with pytest.raises(ClocheError) as corrupt:
            await shelf.put_layer(fd, digest=sha256(b"other"), diff_id=sha256(raw), size=len(gzipped(raw)))
        assert corrupt.value.code == "image_corrupt"
        os.close(fd)
        layer = await put(shelf, raw)
        wrong = LayerRef(layer.digest, sha256(b"other"), layer.size)
        with pytest.raises(ClocheError) as lied:
            await shelf.root([wrong])
        assert lied.value.code == "image_corrupt"
    assert (await images.fsck()).problems == []
    await images.close()


async def test_prebuilt_roots_are_no_base_and_a_policy_is_asked(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "python.erofs").write_bytes(b"root")
    images = await open_images(tmp_path, registry())
    async with images.shelf(OWNER) as shelf:
        with pytest.raises(ClocheError, match="no layers to build on"):
            await shelf.base("python")
    await build(images)
    await images.close()
    images = await open_images(tmp_path, registry(), trust=TrustPolicy(default="refuse"))
    async with images.shelf(OWNER) as shelf:
        with pytest.raises(ClocheError) as refused:
            await shelf.base(BASE)
        assert refused.value.code == "signature_missing"
    await images.close()
