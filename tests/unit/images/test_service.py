"""Images by name: pulled once for everybody, kept apart by owner, made anew when the agent changes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche.wire.images import Credentials, ImageEvent
from cloche_server.images.layout import Layout
from cloche_server.images.service import Images
from cloche_server.images.settings import RegistrySettings
from tests.unit.images.plain_parts import HOST, Clock, MemoryRegistry, PlainConverter, left_in_tmp, open_images
from tests.unit.images.pushing import sha256, tar_of

NAME = f"{HOST}/team/app:1"
MINE = Credentials(username="me", password="secret")


def files(directory: Path, place: str) -> list[str]:
    return sorted(path.name for path in (directory / "images" / place).iterdir())


async def assert_whole(images: Images) -> None:
    report = await images.fsck()
    assert report.problems == []


@pytest.mark.req("IMG-1")
async def test_an_image_is_pulled_converted_and_described(tmp_path: Path) -> None:
    registry, converter = MemoryRegistry(), PlainConverter()
    shown = registry.add(NAME, [tar_of({"a": b"1" * 3_000_000}), tar_of({"b": b"2"})], config={"WorkingDir": "/srv"})
    images = await open_images(tmp_path, registry, converter)
    events: list[ImageEvent] = []
    root = await images.ensure(NAME, owner="uid:1", on_event=events.append)
    assert (root.digest, root.user, root.workdir) == (shown.digest, "7:8", "/srv")
    assert (root.env, root.cmd, root.entrypoint) == ({"PATH": "/bin", "A": "b"}, ("/hello",), ())
    assert (tmp_path / "images" / root.file).read_bytes().startswith(b"ROOT")
    assert events[0].kind == "resolved"
    done = {event.digest: event.bytes_done for event in events if event.kind == "layer"}
    assert done == {sha256(layer): len(layer) for layer in shown.layers}
    view = images.inspect(NAME, "uid:1")
    assert (view.names, view.layers, view.source, view.private) == ([NAME], 2, "registry", False)
    assert (view.lost.xattrs, view.lost.xattr_examples) == (2, ["bin/ping: security.capability"])
    assert view.size_bytes == sum(len(layer) for layer in shown.layers)
    assert view.created == "2024-01-02T03:04:05Z"
    await assert_whole(images)
    assert left_in_tmp(tmp_path) == []
    assert registry.open_sources == 0
    await images.close()


@pytest.mark.req("IMG-3")
async def test_twenty_callers_one_pull_one_conversion(tmp_path: Path) -> None:
    registry, converter = MemoryRegistry(), PlainConverter()
    shown = registry.add(NAME)
    registry.gate = converter.gate = asyncio.Event()
    images = await open_images(tmp_path, registry, converter)
    callers = [asyncio.create_task(images.ensure(NAME, owner=f"uid:{n}")) for n in range(20)]
    await asyncio.sleep(0.05)  # sleep: all of them wait by now
    registry.gate.set()
    roots = await asyncio.gather(*callers)
    assert {root.digest for root in roots} == {shown.digest}
    assert (registry.asked["resolve"], registry.asked[sha256(shown.layers[0])], len(converter.made)) == (1, 1, 1)
    again = await images.ensure(NAME, owner="uid:99")
    assert (again.file, registry.asked["resolve"], len(converter.made)) == (roots[0].file, 1, 1)
    await images.close()


@pytest.mark.req("IMG-3")
async def test_two_images_that_share_a_layer_fetch_it_once_and_images_of_equal_layers_share_a_root(
    tmp_path: Path,
) -> None:
    registry, converter = MemoryRegistry(), PlainConverter()
    common = tar_of({"common": b"c" * 100_000})
    first = registry.add(f"{HOST}/a:1", [common, tar_of({"a": b"a"})])
    registry.add(f"{HOST}/b:1", [common, tar_of({"b": b"b"})])
    registry.add(f"{HOST}/c:1", [common, tar_of({"a": b"a"})], config={"User": "9"})
    registry.gate = asyncio.Event()
    images = await open_images(tmp_path, registry, converter)
    pulls = [asyncio.create_task(images.ensure(f"{HOST}/{each}:1", owner="uid:1")) for each in "abc"]
    await asyncio.sleep(0.05)  # sleep: all of them wait by now
    registry.gate.set()
    a, b, c = await asyncio.gather(*pulls)
    assert registry.asked[sha256(first.layers[0])] == 1
    assert a.file == c.file != b.file
    assert (a.user, c.user) == ("7:8", "9")
    assert len(converter.made) == 2
    await assert_whole(images)
    await images.close()


async def test_a_failure_is_told_to_all_and_not_kept(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    shown = registry.add(NAME)
    registry.damaged.add(sha256(shown.layers[0]))
    registry.gate = asyncio.Event()
    images = await open_images(tmp_path, registry)
    callers = [asyncio.create_task(images.ensure(NAME, owner=f"uid:{n}")) for n in range(3)]
    await asyncio.sleep(0.02)  # sleep: all of them wait by now
    registry.gate.set()
    failures = await asyncio.gather(*callers, return_exceptions=True)
    assert [getattr(failed, "code", failed) for failed in failures] == ["image_corrupt"] * 3
    assert registry.asked["resolve"] == 1
    assert files(tmp_path, "blobs/sha256") == files(tmp_path, "tmp/partial") == files(tmp_path, "images") == []
    registry.damaged.clear()
    assert (await images.ensure(NAME, owner="uid:1")).digest == shown.digest
    await assert_whole(images)
    await images.close()


async def test_who_stops_waiting_stops_nobody_else_and_the_last_stops_the_work(tmp_path: Path) -> None:
    registry, converter = MemoryRegistry(), PlainConverter()
    shown = registry.add(NAME)
    converter.gate = asyncio.Event()
    images = await open_images(tmp_path, registry, converter)

    async def waiting(count: int) -> list[asyncio.Task[object]]:
        callers = [asyncio.create_task(images.ensure(NAME, owner=f"uid:{n}")) for n in range(count)]
        while not converter.running:
            await asyncio.sleep(0.001)  # sleep: polls
        return list(callers)

    first, second = await waiting(2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert converter.running == 1
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert converter.running == registry.open_sources == 0
    assert files(tmp_path, "blobs/sha256") == files(tmp_path, "roots") == files(tmp_path, "images") == []
    await assert_whole(images)
    (third,) = await waiting(1)
    converter.gate.set()
    assert (await third).digest == shown.digest  # type: ignore[attr-defined]
    assert registry.asked[sha256(shown.layers[0])] == 1, "what was downloaded was kept as a partial"
    assert files(tmp_path, "tmp/partial") == []
    await images.close()


async def test_closing_tells_those_who_wait(tmp_path: Path) -> None:
    registry, converter = MemoryRegistry(), PlainConverter()
    registry.add(NAME)
    converter.gate = asyncio.Event()
    images = await open_images(tmp_path, registry, converter)
    caller = asyncio.create_task(images.ensure(NAME, owner="uid:1"))
    while not converter.running:
        await asyncio.sleep(0.001)  # sleep: polls
    await images.close()
    with pytest.raises(ClocheError) as told:
        await caller
    assert told.value.code == "node_unavailable"


@pytest.mark.req("IMG-1")
async def test_a_moved_tag_means_the_new_image_and_a_digest_the_old(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    old = registry.add(NAME, [tar_of({"v": b"1"})])
    images = await open_images(tmp_path, registry)
    await images.ensure(NAME, owner="uid:1")
    new = registry.add(NAME, [tar_of({"v": b"2"})])
    assert (await images.ensure(NAME, owner="uid:1")).digest == old.digest, "it is here"
    assert (await images.ensure(NAME, owner="uid:1", pull="always")).digest == new.digest
    assert (await images.ensure(NAME, owner="uid:1")).digest == new.digest
    pinned = f"{HOST}/team/app@{old.digest}"
    assert (await images.ensure(pinned, owner="uid:1", pull="never")).digest == old.digest
    assert (await images.ensure(old.digest, owner="uid:1")).digest == old.digest
    assert images.inspect(old.digest, "uid:1").names == []
    assert images.inspect(new.digest[7:25], "uid:1").names == [NAME]
    await images.close()


@pytest.mark.req("IMG-1")
async def test_an_index_gives_the_manifest_of_the_platform(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    amd = registry.add(f"{HOST}/x:amd", [tar_of({"a": b"amd"})])
    arm = registry.add(f"{HOST}/x:arm", [tar_of({"a": b"arm"})], architecture="arm64")
    index = registry.add_index(NAME, {"arm64": arm, "amd64": amd})
    images = await open_images(tmp_path, registry)
    assert (await images.ensure(NAME, owner="uid:1", platform="linux/amd64")).digest == amd.digest
    assert (await images.ensure(NAME, owner="uid:1", platform="linux/arm64")).digest == arm.digest
    asked = registry.asked["resolve"]
    pinned = f"{HOST}/other@{index}"
    assert (await images.ensure(pinned, owner="uid:1", platform="amd64", pull="never")).digest == amd.digest
    assert (await images.ensure(NAME, owner="uid:1", platform="arm64")).digest == arm.digest
    assert registry.asked["resolve"] == asked
    with pytest.raises(ClocheError, match="linux/s390x"):
        await images.ensure(NAME, owner="uid:1", platform="linux/s390x")
    with pytest.raises(ClocheError, match="arm64"):
        await images.ensure(f"{HOST}/x:arm", owner="uid:1", platform="linux/amd64")
    await assert_whole(images)
    await images.close()


@pytest.mark.req("ISO-3")
async def test_what_came_with_credentials_is_its_owners_alone(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    shown = registry.add(NAME, [tar_of({"secret": b"s" * 50_000})])
    images = await open_images(tmp_path, registry)
    await images.ensure(NAME, owner="uid:1", credentials=MINE)
    assert [view.private for view in images.list("uid:1")] == [True]
    assert images.list("uid:2") == []
    assert len(images.list("uid:2", is_admin=True)) == 1
    for name in (NAME, shown.digest, f"{HOST}/team/app@{shown.digest}"):
        with pytest.raises(ClocheError) as refused:
            await images.ensure(name, owner="uid:2", pull="never")
        assert refused.value.code == "image_not_found"
        with pytest.raises(ClocheError):
            images.inspect(name, "uid:2")
    # Somebody else gets it only by fetching it himself, every byte: a digest is no proof.
    layer = sha256(shown.layers[0])
    evil = MemoryRegistry(blobs={**registry.blobs, layer: b"x" * len(shown.layers[0])}, kinds=registry.kinds)
    evil.tags = registry.tags
    images._sources = evil.source
    with pytest.raises(ClocheError) as corrupt:
        await images.ensure(NAME, owner="uid:2")
    assert corrupt.value.code == "image_corrupt"
    images._sources = registry.source
    asked = registry.asked[layer]
    await images.ensure(NAME, owner="uid:2")
    assert registry.asked[layer] == asked + 1
    assert [view.private for view in images.list("uid:3")] == [False], "pulled without credentials too"
    await assert_whole(images)
    await images.close()


@pytest.mark.req("ISO-3")
async def test_a_config_that_claims_anothers_layers_gets_nothing_of_them(tmp_path: Path) -> None:
    """The root is named by diff_ids, and a config may say any."""
    registry, converter = MemoryRegistry(), PlainConverter()
    secret = tar_of({"secret": b"s"})
    registry.add(NAME, [secret])
    images = await open_images(tmp_path, registry, converter)
    await images.ensure(NAME, owner="uid:1", credentials=MINE)
    liar = registry.add(f"{HOST}/liar:1", [tar_of({"mine": b"m"})])
    config = liar.config.replace(sha256(tar_of({"mine": b"m"})).encode(), sha256(secret).encode())
    manifest = liar.manifest.replace(sha256(liar.config).encode(), registry.put(config).encode())
    registry.tags[f"{HOST}/liar:1"] = registry.put(manifest, "application/vnd.oci.image.manifest.v1+json")
    with pytest.raises(ClocheError) as refused:
        await images.ensure(f"{HOST}/liar:1", owner="uid:2")
    assert refused.value.code == "image_corrupt"
    assert len(converter.made) == 2
    await assert_whole(images)
    await images.close()


async def test_a_new_agent_makes_new_roots_without_the_network(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    registry.add(NAME)
    running: list[str] = []
    images = await open_images(tmp_path, registry, in_use=lambda: running)
    before = await images.ensure(NAME, owner="uid:1")
    running.append(before.file)
    await images.close()
    images = await open_images(tmp_path, MemoryRegistry(), agent=b"newer agent", in_use=lambda: running)
    after = await images.ensure(NAME, owner="uid:1")
    assert after.file != before.file
    assert after.digest == before.digest
    assert (tmp_path / "images" / before.file).exists(), "a sandbox still runs from it"
    await assert_whole(images)
    running.clear()
    assert (await images.gc()).roots == 1
    assert not (tmp_path / "images" / before.file).exists()
    await images.close()
    images = await open_images(tmp_path, MemoryRegistry(), agent=b"newer agent", version="2")
    assert (await images.ensure(NAME, owner="uid:1")).file not in (before.file, after.file)
    await images.close()


async def test_a_second_node_on_the_same_store_is_refused(tmp_path: Path) -> None:
    images = await open_images(tmp_path)
    with pytest.raises(ClocheError) as busy:
        await open_images(tmp_path)
    assert busy.value.code == "store_busy"
    assert str(tmp_path) in busy.value.message
    await images.close()
    await (await open_images(tmp_path)).close()


async def test_prebuilt_roots_are_found_by_their_bare_name_and_never_touched(tmp_path: Path) -> None:
    place = tmp_path / "images"
    place.mkdir()
    (place / "python.erofs").write_bytes(b"prebuilt")
    (place / "python.json").write_text(
        '{"config": {"User": "5", "Env": ["A=1"], "WorkingDir": "/w", "Cmd": ["sh"]}, "content": {"sha256": "ab"}}'
    )
    (place / "bare.erofs").write_bytes(b"prebuilt")
    images = await open_images(tmp_path)
    root = await images.ensure("python", owner="uid:1")
    assert (root.file, root.user, root.env, root.workdir) == ("python.erofs", "5", {"A": "1"}, "/w")
    assert (root.cmd, root.digest) == (("sh",), "sha256:ab")
    assert (await images.ensure("bare", owner="uid:1")).user == "1000:1000"
    assert [(view.names, view.source) for view in images.list("uid:1")] == [
        (["bare"], "prebuilt"),
        (["python"], "prebuilt"),
    ]
    with pytest.raises(ClocheError) as refused:
        await images.remove("python", "uid:1", is_admin=True)
    assert refused.value.code == "forbidden"
    with pytest.raises(ClocheError) as missing:
        await images.ensure("ruby", owner="uid:1", pull="never")
    assert missing.value.detail["here"] == ["bare", "python"]
    await images.gc(max_bytes=0, max_age_s=0)
    await assert_whole(images)
    assert (place / "python.erofs").read_bytes() == b"prebuilt"
    await images.close()


async def test_a_directory_that_may_not_be_written_has_prebuilt_roots_only(tmp_path: Path) -> None:
    (tmp_path / "python.erofs").write_bytes(b"prebuilt")
    (tmp_path / "agent").write_bytes(b"agent")
    images = await Images.open(
        Path("/sys/kernel/cloche-images"),  # where not even root makes a directory
        settings=RegistrySettings(),
        converter=PlainConverter(),
        converter_version="1",
        agent=tmp_path / "agent",
        sources=MemoryRegistry().source,
        prebuilt=tmp_path,
    )
    assert (await images.ensure("python", owner="uid:1")).file == "python.erofs"
    with pytest.raises(ClocheError) as refused:
        await images.ensure(NAME, owner="uid:1")
    assert refused.value.code == "unsupported"
    assert images.size_bytes() == 0
    await images.close()


async def test_removing_by_name_by_digest_and_by_whom(tmp_path: Path) -> None:
    registry, running = MemoryRegistry(), list[str]()
    shown = registry.add(NAME)
    registry.tags[f"{HOST}/team/app:2"] = shown.digest
    clock = Clock()
    images = await open_images(tmp_path, registry, in_use=lambda: running, clock=clock)
    root = await images.ensure(NAME, owner="uid:1")
    await images.pull(f"{HOST}/team/app:2", owner="uid:1")
    clock.now += 3600
    with pytest.raises(ClocheError) as everybodys:
        await images.remove(NAME, "uid:1")
    assert everybodys.value.code == "forbidden"
    running += [root.file, root.file]
    assert images.inspect(NAME, "uid:1").in_use == 2
    await images.remove(NAME, "uid:0", is_admin=True)
    assert images.inspect(shown.digest, "uid:1").names == [f"{HOST}/team/app:2"]
    with pytest.raises(ClocheError) as used:
        await images.remove(shown.digest, "uid:0", is_admin=True)
    assert used.value.code == "image_in_use"
    running.clear()
    await images.remove(shown.digest, "uid:0", is_admin=True)
    assert images.list("uid:0", is_admin=True) == []
    assert files(tmp_path, "blobs/sha256") == files(tmp_path, "roots") == files(tmp_path, "names") == []
    await images.pull(NAME, owner="uid:1", credentials=MINE)
    await images.pull(NAME, owner="uid:2", credentials=MINE)
    await images.remove(NAME, "uid:1")
    assert images.list("uid:1") == []
    assert len(images.list("uid:2")) == 1
    await images.remove(NAME, "uid:2")
    assert images.list("uid:0", is_admin=True) == []
    await assert_whole(images)
    await images.close()


async def test_the_store_is_closed_to_other_users_of_the_machine(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    registry.add(NAME)
    images = await open_images(tmp_path, registry)
    root = await images.ensure(NAME, owner="uid:1")
    here = Layout(tmp_path / "images")
    modes = {place.name: place.stat().st_mode & 0o777 for place in (here.blobs, here.images, here.names, here.tmp)}
    assert set(modes.values()) == {0o700}
    assert here.roots.stat().st_mode & 0o777 == 0o711
    assert (here.root / root.file).stat().st_mode & 0o777 == 0o444
    await images.close()
