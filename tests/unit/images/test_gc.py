"""Collection: what nobody needs, then by age and size, least recently used first; never what is held or runs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images.build.protocols import Cached
from cloche_server.images.layout import Layout
from cloche_server.images.service import Images
from cloche_server.images.store import HANDOVER_S
from tests.unit.images.plain_parts import HOST, Clock, MemoryRegistry, PlainConverter, open_images
from tests.unit.images.pushing import gzipped, sha256, tar_of

OWNER = "uid:1"
COMMON = tar_of({"common": b"c" * 50_000})

pytestmark = pytest.mark.req("IMG-3")


def name(each: str) -> str:
    return f"{HOST}/{each}:1"


class House:
    """Three images of a common layer, pulled a day apart."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = Clock()
        self.running: list[str] = []
        self.registry = MemoryRegistry()
        self.converter = PlainConverter()
        for each in "abc":
            self.registry.add(name(each), [COMMON, tar_of({each: each.encode() * 10_000})])
        self.images: Images

    async def open(self) -> House:
        self.images = await open_images(
            self.directory, self.registry, self.converter, in_use=lambda: self.running, clock=self.clock
        )
        for each in "abc":
            await self.images.ensure(name(each), owner=OWNER)
            self.clock.now += 86400
        return self

    def here(self) -> list[str]:
        return sorted(each for view in self.images.list(OWNER) for each in view.names)


async def test_without_limits_only_what_nobody_needs_goes(tmp_path: Path) -> None:
    house = await House(tmp_path).open()
    here = Layout(tmp_path / "images")
    (here.partial / ("0" * 64)).write_bytes(b"half")
    house.registry.add(name("a"), [COMMON, tar_of({"a": b"newer"})])
    await house.images.ensure(name("a"), owner=OWNER, pull="always")
    assert len(house.images.list(OWNER)) == 4
    house.clock.now += HANDOVER_S
    done = await house.images.gc()
    assert (len(done.images), done.roots, done.blobs) == (1, 1, 3)
    assert done.bytes > 0
    assert list(here.partial.iterdir()) == []
    assert house.here() == [name("a"), name("b"), name("c")]
    assert (await house.images.fsck()).problems == []
    assert (await house.images.gc()).bytes == 0
    await house.images.close()


async def test_by_age_the_unused_go_and_use_counts(tmp_path: Path) -> None:
    house = await House(tmp_path).open()
    await house.images.ensure(name("a"), owner=OWNER)
    house.clock.now += 3600
    done = await house.images.gc(max_age_s=1.5 * 86400)
    assert (len(done.images), house.here()) == (1, [name("a"), name("c")])
    await house.images.close()


async def test_by_size_the_least_recently_used_go_first(tmp_path: Path) -> None:
    house = await House(tmp_path).open()
    await house.images.ensure(name("a"), owner=OWNER)
    house.clock.now += 3600
    size = house.images.size_bytes()
    done = await house.images.gc(max_bytes=size - 1)
    assert house.here() == [name("a"), name("c")], "b was not used for longest"
    assert house.images.size_bytes() == size - done.bytes < size
    await house.images.gc(max_bytes=0)
    assert house.here() == []
    assert house.images.size_bytes() == 0
    assert (await house.images.fsck()).problems == []
    await house.images.close()


async def test_what_runs_or_is_about_to_or_is_held_stays(tmp_path: Path) -> None:
    house = await House(tmp_path).open()
    a = await house.images.ensure(name("a"), owner=OWNER, pull="never")
    house.clock.now += 86400
    b = await house.images.ensure(name("b"), owner=OWNER)
    house.clock.now += 86400
    house.running.append(a.file)
    with house.images.holding(b):
        await house.images.ensure(name("c"), owner=OWNER)
        assert (await house.images.gc(max_bytes=0, max_age_s=0)).images == []
        assert house.here() == [name("a"), name("b"), name("c")]
    house.clock.now += HANDOVER_S
    assert len((await house.images.gc(max_bytes=0)).images) == 2
    assert house.here() == [name("a")]
    with pytest.raises(ClocheError) as used:
        await house.images.remove(name("a"), OWNER, is_admin=True)
    assert used.value.code == "image_in_use"
    house.running.clear()
    await house.images.gc(max_bytes=0)
    assert house.here() == []
    await house.images.close()


async def test_a_pull_under_way_is_not_disturbed(tmp_path: Path) -> None:
    house = await House(tmp_path).open()
    house.registry.add(name("d"), [COMMON, tar_of({"d": b"d" * 10_000})])
    house.converter.gate = asyncio.Event()
    pull = asyncio.create_task(house.images.ensure(name("d"), owner=OWNER))
    while not house.converter.running:
        await asyncio.sleep(0.001)  # sleep: polls
    assert (await house.images.fsck()).problems == [], "blobs that are held belong to somebody"
    await house.images.gc(max_bytes=0, max_age_s=0)
    house.converter.gate.set()
    root = await pull
    assert (tmp_path / "images" / root.file).is_file()
    assert house.here()[-1] == name("d")
    assert (await house.images.fsck()).problems == []
    await house.images.close()


async def test_an_export_under_way_keeps_its_image(tmp_path: Path) -> None:
    house = await House(tmp_path).open()
    stream = house.images.export(name("a"), OWNER)
    start = await anext(stream)
    house.clock.now += 86400
    await house.images.gc(max_bytes=0, max_age_s=0)
    assert house.here() == [name("a")]
    assert len(start + b"".join([piece async for piece in stream])) % 512 == 0
    await house.images.gc(max_bytes=0)
    assert house.here() == []
    await house.images.close()


async def test_steps_of_builds_go_by_age_too(tmp_path: Path) -> None:
    house = await House(tmp_path).open()
    raw = tar_of({"step": b"s" * 1000})
    async with house.images.shelf(OWNER) as shelf:
        fd = shelf.temporary()
        os.write(fd, gzipped(raw))
        layer = await shelf.put_layer(fd, digest=sha256(gzipped(raw)), diff_id=sha256(raw), size=len(gzipped(raw)))
        os.close(fd)
        await shelf.put("key", Cached((layer,), "2024"))
        await house.images.gc(max_bytes=0, max_age_s=0)
        assert await shelf.get("key") is not None, "the build holds it"
    house.clock.now += 3600
    await house.images.gc(max_age_s=7200)
    async with house.images.shelf(OWNER) as shelf:
        assert await shelf.get("key") == Cached((layer,), "2024")
    async with house.images.shelf("uid:2") as shelf:
        assert await shelf.get("key") is None, "somebody else's"
    house.clock.now += 7201
    await house.images.gc(max_age_s=7200)
    async with house.images.shelf(OWNER) as shelf:
        assert await shelf.get("key") is None
    assert not Layout(tmp_path / "images").blob(layer.digest).exists()
    await house.images.close()
