"""Pulls: resumed where they stopped, refused when damaged, never visible before they are whole; signatures when asked."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from cloche.wire.errors import ClocheError
from cloche.wire.images import Credentials
from cloche_server.images import blobs
from cloche_server.images.layout import Layout
from cloche_server.images.opening import PARTIAL_AGE_S_MAX
from cloche_server.images.reference import parse
from cloche_server.images.service import Images, Root
from cloche_server.images.trust import Rule, TrustPolicy, signature_tag
from tests.unit.images.plain_parts import HOST, Clock, MemoryRegistry, PlainConverter, Shown, left_in_tmp, open_images
from tests.unit.images.pushing import COSIGN, sha256, tar_of

NAME = f"{HOST}/team/app:1"
OWNER = "uid:1"


def big() -> bytes:
    return tar_of({"big": os.urandom(3_000_000)})


async def failure(images: object, name: str = NAME, **more: object) -> ClocheError:
    with pytest.raises(ClocheError) as failed:
        await images.ensure(name, owner=OWNER, **more)  # type: ignore[attr-defined]
    return failed.value


@pytest.mark.req("IMG-1")
async def test_an_interrupted_layer_goes_on_where_it_stopped_also_after_a_restart(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    shown = registry.add(NAME, [big()])
    layer = sha256(shown.layers[0])
    registry.cut[layer] = 1_000_001
    images = await open_images(tmp_path, registry)
    assert (await failure(images)).code == "registry_unreachable"
    assert left_in_tmp(tmp_path) == sorted(f"partial/{each[7:]}" for each in (layer, sha256(shown.config)))
    assert (tmp_path / "images/tmp/partial" / layer[7:]).stat().st_size == 1_000_001
    assert images.list(OWNER) == []
    registry.cut[layer] = 2_000_002
    assert (await failure(images)).code == "registry_unreachable"
    await images.close()
    images = await open_images(tmp_path, registry)
    registry.cut.clear()
    assert (await images.ensure(NAME, owner=OWNER)).digest == shown.digest
    assert registry.sent_bytes == len(shown.layers[0]) + len(shown.config), "no byte twice"
    assert left_in_tmp(tmp_path) == []
    assert (await images.fsck()).problems == []
    await images.close()


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize("damage", ["flipped", "too long", "whole but wrong", "sealed and wrong"])
async def test_a_damaged_partial_is_fetched_anew(tmp_path: Path, damage: str) -> None:
    registry = MemoryRegistry()
    shown = registry.add(NAME, [big()])
    data = shown.layers[0]
    images = await open_images(tmp_path, registry)
    partial = tmp_path / "images/tmp/partial" / sha256(data)[7:]
    partial.write_bytes(
        {
            "flipped": b"x" + data[1:500_000],
            "too long": data + b"x",
            "whole but wrong": b"x" + data[1:],
            "sealed and wrong": b"x" + data[1:1000],
        }[damage]
    )
    if damage == "sealed and wrong":
        partial.chmod(0o444)
    assert (await images.ensure(NAME, owner=OWNER)).digest == shown.digest
    assert (await images.fsck()).problems == []
    await images.close()


@pytest.mark.req("IMG-1")
async def test_damage_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    shown = registry.add(NAME, [tar_of({"a": b"a"}), big()])
    images = await open_images(tmp_path, registry)
    good = registry.blobs[sha256(shown.layers[1])]
    for bad in (b"x" + good[1:], good[:-1], good + b"x"):
        registry.blobs[sha256(shown.layers[1])] = bad
        found = await failure(images)
        assert found.code == ("registry_unreachable" if len(bad) < len(good) else "image_corrupt")
        assert images.list(OWNER) == []
        assert list((tmp_path / "images/blobs/sha256").iterdir()) == []
    registry.blobs[sha256(shown.layers[1])] = good
    await images.ensure(NAME, owner=OWNER)
    assert (await images.fsck()).problems == []
    await images.close()


async def test_a_mirror_that_lies_is_passed_over(tmp_path: Path) -> None:
    """The second attempt asks without mirrors; the source in memory lies only the first time."""
    registry = MemoryRegistry()
    shown = registry.add(NAME)
    layer = sha256(shown.layers[0])
    asked: list[bool] = []
    source_of = registry.source

    def lying(credentials: object) -> object:
        source = source_of(credentials)
        honest = source.blob

        def blob(ref: object, what: object, offset: int = 0, *, use_mirrors: bool = True) -> object:
            if what.digest == layer:  # type: ignore[attr-defined]
                asked.append(use_mirrors)
                (registry.damaged.add if use_mirrors else registry.damaged.discard)(layer)
            return honest(ref, what, offset, use_mirrors=use_mirrors)  # type: ignore[arg-type]

        source.blob = blob  # type: ignore[assignment, method-assign]
        return source

    images = await open_images(tmp_path, registry)
    images._sources = lying  # type: ignore[assignment]
    assert (await images.ensure(NAME, owner=OWNER)).digest == shown.digest
    assert asked == [True, False]
    await images.close()


async def test_a_layer_that_the_converter_refuses_leaves_nothing(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    registry.add(NAME, [tar_of({"a": b"EVIL"})])
    images = await open_images(tmp_path, registry)
    assert (await failure(images)).detail["reason"] == "bad_name"
    assert left_in_tmp(tmp_path) == []
    assert list((tmp_path / "images/blobs/sha256").iterdir()) == []
    assert (await images.fsck()).problems == []
    await images.close()


async def test_what_does_not_fit_is_said_before_it_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = MemoryRegistry()
    shown = registry.add(NAME, [big()])
    images = await open_images(tmp_path, registry)
    monkeypatch.setattr(blobs, "SPARE_BYTES", 1 << 60)
    found = await failure(images)
    assert found.code == "no_space"
    assert "gc" in found.fix
    assert registry.asked[sha256(shown.layers[0])] == 0
    await images.close()


async def test_partials_of_one_owner_are_not_anothers(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    shown = registry.add(NAME, [big()])
    layer = sha256(shown.layers[0])
    registry.cut[layer] = 1_000_000
    images = await open_images(tmp_path, registry)
    await failure(images, credentials=Credentials(username="u", password="p"))
    wanted = (f"partial/{layer[7:]}.", f"partial/{sha256(shown.config)[7:]}.")
    assert [path.startswith(wanted) for path in left_in_tmp(tmp_path)] == [True, True]
    registry.cut.clear()
    registry.sent_bytes = 0
    with pytest.raises(ClocheError):
        await images.ensure(NAME, owner="uid:2", pull="never")
    await images.ensure(NAME, owner="uid:2")
    assert registry.sent_bytes >= len(shown.layers[0])
    await images.close()


async def test_old_partials_go_at_the_next_start(tmp_path: Path) -> None:
    clock = Clock()
    images = await open_images(tmp_path, clock=clock)
    here = Layout(tmp_path / "images")
    old, new = here.partial / ("1" * 64), here.partial / ("2" * 64)
    for path, age in ((old, PARTIAL_AGE_S_MAX + 1), (new, PARTIAL_AGE_S_MAX - 1)):
        path.write_bytes(b"half")
        os.utime(path, (clock.now - age, clock.now - age))
    await images.close()
    images = await open_images(tmp_path, clock=clock)
    assert left_in_tmp(tmp_path) == [f"partial/{'2' * 64}"]
    await images.close()


async def test_the_same_layer_twice_is_fetched_once(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    layer = tar_of({"empty": b""})
    shown = registry.add(NAME, [layer, tar_of({"a": b"a"}), layer])
    images = await open_images(tmp_path, registry)
    await images.ensure(NAME, owner=OWNER)
    assert registry.asked[sha256(shown.layers[0])] == 1
    assert (await images.fsck()).problems == []
    await images.close()


async def test_an_image_without_layers_is_an_image(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    registry.add(NAME, [])
    images = await open_images(tmp_path, registry)
    root = await images.ensure(NAME, owner=OWNER)
    assert root.file == await images.empty_root()
    assert (await images.fsck()).problems == []
    await images.close()


async def two_pulls_of_one_layer(directory: Path) -> tuple[MemoryRegistry, Images, list[asyncio.Task[Root]], str]:
    """Two names; the second has joined the download that the first began, which waits at the gate."""
    registry = MemoryRegistry()
    layer = big()
    first = registry.add(f"{HOST}/a:1", [layer])
    second = registry.add(f"{HOST}/b:1", [layer], config={"User": "1"})
    digest = sha256(first.layers[0])
    registry.gate = asyncio.Event()
    images = await open_images(directory, registry)
    pulls = [asyncio.create_task(images.ensure(f"{HOST}/a:1", owner=OWNER))]
    while not registry.asked[digest]:
        await asyncio.sleep(0.001)  # sleep: polls
    pulls.append(asyncio.create_task(images.ensure(f"{HOST}/b:1", owner=OWNER)))
    flight = images._pulls._downloads._going_on[(digest, "")]
    while flight.waiting < 2:
        await asyncio.sleep(0.001)  # sleep: polls
    assert registry.asked[sha256(second.config)] == 1
    return registry, images, pulls, digest


async def test_a_waiter_tries_itself_when_the_others_download_was_denied(tmp_path: Path) -> None:
    registry, images, pulls, digest = await two_pulls_of_one_layer(tmp_path)
    registry.denied[digest] = 1
    assert registry.gate is not None
    registry.gate.set()
    first, second = await asyncio.gather(*pulls, return_exceptions=True)
    assert isinstance(first, ClocheError)
    assert first.code == "registry_denied"
    assert isinstance(second, Root)
    assert (registry.asked[digest], registry.open_sources) == (2, 0)
    assert (await images.fsck()).problems == []
    await images.close()


async def test_a_download_outlives_the_pull_that_began_it(tmp_path: Path) -> None:
    registry, images, pulls, digest = await two_pulls_of_one_layer(tmp_path)
    pulls[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulls[0]
    assert registry.open_sources == 2, "the first one's source is still used"
    assert registry.gate is not None
    registry.gate.set()
    assert (await pulls[1]).user == "1"
    assert (registry.asked[digest], registry.open_sources) == (1, 0)
    assert (await images.fsck()).problems == []
    await images.close()


# --- signatures -------------------------------------------------------------------------------------


def sign(registry: MemoryRegistry, shown_digest: str, key: ed25519.Ed25519PrivateKey) -> None:
    payload = json.dumps(
        {
            "critical": {
                "identity": {"docker-reference": ""},
                "image": {"docker-manifest-digest": shown_digest},
                "type": "cosign container image signature",
            }
        }
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": sha256(b"{}"), "size": 2},
            "layers": [
                {
                    "mediaType": COSIGN,
                    "digest": registry.put(payload),
                    "size": len(payload),
                    "annotations": {"dev.cosignproject.cosign/signature": base64.b64encode(key.sign(payload)).decode()},
                }
            ],
        }
    ).encode()
    where = parse(NAME).tagged(signature_tag(shown_digest)).name
    registry.tags[where] = registry.put(manifest, "application/vnd.oci.image.manifest.v1+json")


KEY = ed25519.Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"test").digest())
OTHER_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"other").digest())
REQUIRED = TrustPolicy(keys={"release": KEY.public_key()}, rules=(Rule(HOST, keys=("release",)),))


async def test_a_required_signature_is_asked_before_anything_is_converted(tmp_path: Path) -> None:
    registry, converter = MemoryRegistry(), PlainConverter()
    shown: Shown = registry.add(NAME)
    images = await open_images(tmp_path, registry, converter, trust=REQUIRED)
    assert (await failure(images)).code == "signature_missing"
    sign(registry, shown.digest, OTHER_KEY)
    assert (await failure(images)).code == "signature_invalid"
    assert converter.made == []
    assert images.list(OWNER) == []
    sign(registry, shown.digest, KEY)
    await images.ensure(NAME, owner=OWNER)
    assert images.inspect(NAME, OWNER).signed_by == ["release"]
    assert (await images.fsck()).problems == []
    # Again from what the store keeps, without the network.
    asked = registry.asked["resolve"]
    await images.ensure(NAME, owner=OWNER, pull="never")
    await images.ensure(shown.digest, owner=OWNER)
    assert registry.asked["resolve"] == asked
    await images.close()


async def test_a_policy_that_became_stricter_holds_for_what_is_here(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    shown = registry.add(NAME)
    images = await open_images(tmp_path, registry)
    await images.ensure(NAME, owner=OWNER)
    await images.close()
    images = await open_images(tmp_path, registry, trust=REQUIRED)
    for name in (NAME, shown.digest):
        assert (await failure(images, name, pull="never")).code == "signature_missing"
    assert (await failure(images)).code == "signature_missing"
    sign(registry, shown.digest, KEY)
    assert (await images.ensure(NAME, owner=OWNER)).digest == shown.digest, "the registry has one now"
    assert images.inspect(NAME, OWNER).signed_by == ["release"]
    await images.close()
    images = await open_images(tmp_path, MemoryRegistry(), trust=REQUIRED)
    assert (await images.ensure(NAME, owner=OWNER)).digest == shown.digest
    await images.close()


async def test_a_signature_over_the_index_or_over_the_manifest_counts(tmp_path: Path) -> None:
    for number, signed in enumerate(("index", "manifest")):
        registry = MemoryRegistry()
        shown = registry.add(f"{HOST}/x:amd")
        index = registry.add_index(NAME, {"amd64": shown})
        sign(registry, index if signed == "index" else shown.digest, KEY)
        (tmp_path / str(number)).mkdir()
        images = await open_images(tmp_path / str(number), registry, trust=REQUIRED)
        assert (await images.ensure(NAME, owner=OWNER)).digest == shown.digest
        assert (await images.ensure(NAME, owner=OWNER, pull="never")).digest == shown.digest
        assert (await images.fsck()).problems == []
        await images.close()
