"""Archives: what skopeo writes is imported, what we export skopeo reads, and what lies is refused."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images.service import Images
from cloche_server.images.trust import TrustPolicy
from tests.unit.images.plain_parts import (
    HOST,
    MemoryRegistry,
    PlainConverter,
    Shown,
    left_in_tmp,
    open_images,
    pieces,
    tar_with,
)
from tests.unit.images.pushing import sha256, tar_of

OWNER = "uid:1"
NAME = f"{HOST}/team/app:1"
LAYERS = [tar_of({"a": b"a" * 20_000}), tar_of({"b": b"b"})]
POLICY = ["--insecure-policy"]

pytestmark = pytest.mark.req("IMG-1")


def skopeo(*args: str | Path) -> str:
    done = subprocess.run(["skopeo", *map(str, args)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def exported(images: Images, name: str = NAME) -> bytes:
    return b"".join([piece async for piece in images.export(name, OWNER)])


async def pulled(directory: Path, layers: list[bytes] | None = None) -> tuple[Images, Shown]:
    registry = MemoryRegistry()
    shown = registry.add(NAME, LAYERS if layers is None else layers)
    images = await open_images(directory, registry)
    await images.ensure(NAME, owner=OWNER)
    return images, shown


async def refused(images: Images, data: bytes, **more: Any) -> ClocheError:
    with pytest.raises(ClocheError) as failed:
        await images.import_archive(pieces(data), owner=OWNER, **more)
    assert images.list(OWNER) == []
    assert left_in_tmp(images._store.layout.root.parent) == []
    assert (await images.fsck()).problems == []
    return failed.value


async def test_an_export_is_the_same_each_time_and_comes_back_with_its_digest(tmp_path: Path) -> None:
    images, shown = await pulled(tmp_path)
    data = await exported(images)
    assert hashlib.sha256(data).digest() == hashlib.sha256(await exported(images)).digest()
    (tmp_path / "second").mkdir()
    second = await open_images(tmp_path / "second")
    (view,) = await second.import_archive(pieces(data), owner=OWNER)
    assert (view.digest, view.names, view.source, view.private) == (shown.digest, [NAME], "archive", True)
    assert (await second.ensure(NAME, owner=OWNER, pull="never")).digest == shown.digest
    assert await exported(second) == data
    (view,) = await second.import_archive(pieces(data), f"{HOST}/mine:2", owner=OWNER)
    assert view.names == [f"{HOST}/mine:2", NAME]
    assert (await second.fsck()).problems == []
    assert left_in_tmp(tmp_path / "second") == []
    await images.close()
    await second.close()


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
async def test_skopeo_reads_what_we_export(tmp_path: Path) -> None:
    images, shown = await pulled(tmp_path)
    (tmp_path / "out.tar").write_bytes(await exported(images))
    seen = json.loads(skopeo("inspect", f"oci-archive:{tmp_path / 'out.tar'}"))
    assert (seen["Digest"], seen["Layers"]) == (shown.digest, [sha256(layer) for layer in shown.layers])
    skopeo(*POLICY, "copy", f"oci-archive:{tmp_path / 'out.tar'}", f"oci:{tmp_path / 'layout'}:x")
    raw = skopeo("inspect", "--raw", f"oci:{tmp_path / 'layout'}:x")
    assert sha256(raw.encode()) == shown.digest
    await images.close()


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
@pytest.mark.parametrize("kind", ["oci-archive", "docker-archive"])
async def test_we_read_what_skopeo_writes(tmp_path: Path, kind: str) -> None:
    images, shown = await pulled(tmp_path)
    (tmp_path / "out.tar").write_bytes(await exported(images))
    named = {"oci-archive": "", "docker-archive": f":{NAME}"}[kind]
    skopeo(*POLICY, "copy", f"oci-archive:{tmp_path / 'out.tar'}", f"{kind}:{tmp_path / 'in.tar'}{named}")
    (tmp_path / "second").mkdir()
    converter = PlainConverter()
    second = await open_images(tmp_path / "second", converter=converter)
    wanted = None if named else NAME
    (view,) = await second.import_archive(pieces((tmp_path / "in.tar").read_bytes()), wanted, owner=OWNER)
    assert (view.names, view.layers) == ([NAME], 2)
    if kind == "oci-archive":
        assert view.digest == shown.digest
    assert converter.made == [tuple(sha256(layer) for layer in LAYERS)]
    root = await second.ensure(NAME, owner=OWNER, pull="never")
    assert (root.user, root.cmd) == ("7:8", ("/hello",))
    again = await second.import_archive(pieces((tmp_path / "in.tar").read_bytes()), wanted, owner=OWNER)
    assert again[0].digest == view.digest, "the same archive makes the same image"
    assert (await second.fsck()).problems == []
    await images.close()
    await second.close()


def docker_save(config: bytes, layers: dict[str, bytes], **more: Any) -> dict[str, bytes]:
    manifest = [{"Config": "c.json", "RepoTags": [NAME], "Layers": list(layers), **more}]
    return {"manifest.json": json.dumps(manifest).encode(), "c.json": config, **layers}


def config_of(*layers: bytes, **more: Any) -> bytes:
    document = {"architecture": "amd64", "os": "linux", "config": {}, **more}
    return json.dumps(document | {"rootfs": {"type": "layers", "diff_ids": [sha256(each) for each in layers]}}).encode()


async def test_an_old_docker_save_with_links_between_its_layers(tmp_path: Path) -> None:
    images = await open_images(tmp_path)
    files = docker_save(config_of(LAYERS[0], LAYERS[0]), {"one/layer.tar": LAYERS[0], "two/layer.tar": b""})
    del files["two/layer.tar"]
    (view,) = await images.import_archive(pieces(tar_with(files, {"two/layer.tar": "../one/layer.tar"})), owner=OWNER)
    assert (view.names, view.layers) == ([NAME], 2)
    assert (await images.fsck()).problems == []
    await images.close()


async def test_archives_that_lie_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    images = await open_images(tmp_path)
    good = docker_save(config_of(LAYERS[0]), {"l.tar": LAYERS[0]})
    other = {**good, "l.tar": LAYERS[1]}
    table: dict[str, tuple[bytes, str]] = {
        "nothing known": (tar_with({"hello": b"x"}), "image_refused"),
        "another layer": (tar_with(other), "image_corrupt"),
        "no layer": (tar_with({key: value for key, value in good.items() if key != "l.tar"}), "image_refused"),
        "layers miscounted": (tar_with(docker_save(config_of(*LAYERS), {"l.tar": LAYERS[0]})), "image_refused"),
        "not a list": (tar_with({**good, "manifest.json": b'{"a": 1}'}), "image_refused"),
        "two lists": (tar_with({**good, "manifest.json": b'[], "images": []'}), "image_refused"),
        "a config outside": (
            tar_with({**good, "manifest.json": b'[{"Config": "../../etc/passwd", "Layers": []}]'}),
            "image_refused",
        ),
        "a link outside": (
            tar_with({key: value for key, value in good.items() if key != "l.tar"}, {"l.tar": "/etc/passwd"}),
            "image_refused",
        ),
        "a link to itself": (
            tar_with({key: value for key, value in good.items() if key != "l.tar"}, {"l.tar": "l.tar"}),
            "image_refused",
        ),
        "twice the same name": (tar_with(good, again={"c.json": b"{}"}), "image_refused"),
        "an image for nobody": (
            tar_with({"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": index_of()}),
            "image_not_found",
        ),
        "an unknown layout": (
            tar_with({"oci-layout": b'{"imageLayoutVersion": "2.0.0"}', "index.json": index_of()}),
            "image_refused",
        ),
    }
    for what, (data, code) in table.items():
        found = await refused(images, data)
        assert found.code == code, what
    assert (await refused(images, tar_with(good), bytes_max=5000)).code == "too_large"
    with pytest.raises(ClocheError, match="a name is for one"):
        await images.import_archive(
            pieces(tar_with({**good, "manifest.json": json.dumps(json.loads(good["manifest.json"]) * 2).encode()})),
            NAME,
            owner=OWNER,
        )
    assert len(await images.import_archive(pieces(tar_with(good)), owner=OWNER)) == 1
    await images.close()


def index_of(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"schemaVersion": 2, "manifests": list(entries)}).encode()


async def test_an_import_is_its_owners_and_hides_nobodys_name(tmp_path: Path) -> None:
    """Somebody who imports under a well-known name changes it for himself alone."""
    images, shown = await pulled(tmp_path)
    fake = docker_save(config_of(LAYERS[0]), {"l.tar": LAYERS[0]})
    (view,) = await images.import_archive(pieces(tar_with(fake)), owner="uid:2")
    assert (await images.ensure(NAME, owner="uid:2")).digest == view.digest
    assert (await images.ensure(NAME, owner=OWNER)).digest == shown.digest
    await images.close()


async def test_a_policy_is_asked_of_what_is_brought(tmp_path: Path) -> None:
    images = await open_images(tmp_path, trust=TrustPolicy(default="refuse"))
    good = tar_with(docker_save(config_of(LAYERS[0]), {"l.tar": LAYERS[0]}))
    assert (await refused(images, good)).code == "signature_missing"
    await images.close()


async def test_a_name_that_is_only_a_tag_names_nothing(tmp_path: Path) -> None:
    images, _ = await pulled(tmp_path)
    data = await exported(images)
    changed = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as old, tarfile.open(fileobj=changed, mode="w") as new:
        for member in old:
            content = old.extractfile(member)
            body = content.read() if content else b""
            if member.name == "index.json":
                body = body.replace(b"io.containerd.image.name", b"x")
                member.size = len(body)
            new.addfile(member, io.BytesIO(body) if content else None)
    (tmp_path / "second").mkdir()
    second = await open_images(tmp_path / "second")
    (view,) = await second.import_archive(pieces(changed.getvalue()), owner=OWNER)
    assert view.names == []
    assert (await second.ensure(view.digest, owner=OWNER)).digest == view.digest
    await images.close()
    await second.close()
