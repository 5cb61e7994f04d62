"""The whole way with the real parts: a registry, the converter's binary and mkfs.erofs; archives through the converter."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloche_engine
from cloche.wire.errors import ClocheError
from cloche.wire.images import Credentials
from cloche_server.images.service import Images
from cloche_server.images.settings import RegistrySettings
from cloche_server.images.worker import Converter
from tests.unit.images import registries
from tests.unit.images.plain_parts import pieces
from tests.unit.images.pushing import push, push_index, sha256, tar_of
from tests.unit.images.registries import PASSWORD, USER, RunningRegistry

BIN = Path(cloche_engine.__file__).parent / "bin"
CONVERTER = BIN / f"cloche-convert-{os.uname().machine}"
OWNER = "uid:1"

pytestmark = [
    pytest.mark.req("IMG-1"),
    pytest.mark.skipif(not registries.can_run(), reason="docker-registry is not installed"),
    pytest.mark.skipif(not CONVERTER.exists(), reason="the converter is not built"),
]


class Child:
    """The converter without its walls: those are the keeper's, and tested there."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        argv = [str(CONVERTER), str(BIN / "mkfs.erofs")]
        self._process = subprocess.Popen(argv, stdin=theirs, stdout=subprocess.DEVNULL, stderr=self._errors)
        theirs.close()

    def last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read(65536).decode(errors="replace")

    async def kill(self) -> int:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self.channel.close()
        self._errors.close()
        return 0


async def start(*, memory_bytes: int, disk_bytes: int) -> Child:
    return Child()


async def opened(directory: Path) -> Images:
    return await Images.open(
        directory,
        settings=RegistrySettings(),
        converter=Converter(start),
        converter_version="1",
        agent=BIN / f"cloche-guest-{os.uname().machine}",
    )


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    with registries.running(tmp_path_factory.mktemp("registry")) as started:
        yield started


@pytest.fixture(scope="module")
def closed_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    with registries.running(tmp_path_factory.mktemp("closed"), basic=True) as started:
        yield started


async def test_pulled_by_tag_by_digest_and_through_an_index(tmp_path: Path, registry: RunningRegistry) -> None:
    layers = [tar_of({"a": os.urandom(3_000_000), "gone": b"x"}), tar_of({".wh.gone": b"", "b": b"2"})]
    pushed = push(registry, "team/app", "1", layers, {"Cmd": ["/a"]})
    other = push(registry, "team/app", "arm", layers[:1], platform="linux/arm64")
    index = push_index(registry, "team/app", "all", {"linux/arm64": other, "linux/amd64": pushed})
    images = await opened(tmp_path)
    roots = [
        await images.ensure(f"{registry.host}/team/app{end}", owner=OWNER)
        for end in (":1", f"@{pushed.digest}", ":all", f"@{index.digest}")
    ]
    assert {root.digest for root in roots} == {pushed.digest}
    made = (tmp_path / roots[0].file).read_bytes()
    assert made[1024:1028] == bytes.fromhex("e2e1f5e0"), "EROFS"
    view = images.inspect(f"{registry.host}/team/app:1", OWNER)
    assert view.root_bytes == len(made)
    assert view.entries > 2
    assert (await images.fsck()).problems == []
    await images.close()


async def test_a_damaged_layer_is_refused_and_the_mended_one_taken(tmp_path: Path, registry: RunningRegistry) -> None:
    pushed = push(registry, "team/damaged", "1", [tar_of({"a": os.urandom(100_000)})])
    file = registry.blob_file(sha256(pushed.blobs[0]))
    file.write_bytes(b"x" + pushed.blobs[0][1:])
    images = await opened(tmp_path)
    with pytest.raises(ClocheError) as refused:
        await images.ensure(f"{registry.host}/team/damaged:1", owner=OWNER)
    assert refused.value.code == "image_corrupt"
    assert images.list(OWNER) == []
    file.write_bytes(pushed.blobs[0])
    await images.ensure(f"{registry.host}/team/damaged:1", owner=OWNER)
    assert (await images.fsck()).problems == []
    await images.close()


async def test_a_private_image_needs_its_owners_login(tmp_path: Path, closed_registry: RunningRegistry) -> None:
    pushed = push(closed_registry, "team/secret", "1", [tar_of({"a": b"secret"})])
    name = f"{closed_registry.host}/team/secret:1"
    images = await opened(tmp_path)
    with pytest.raises(ClocheError) as denied:
        await images.ensure(name, owner=OWNER)
    assert denied.value.code == "registry_denied"
    root = await images.ensure(name, owner=OWNER, credentials=Credentials(username=USER, password=PASSWORD))
    assert root.digest == pushed.digest
    with pytest.raises(ClocheError) as denied:
        await images.ensure(name, owner="uid:2")
    assert denied.value.code == "registry_denied"
    assert [view.private for view in images.list(OWNER)] == [True]
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert PASSWORD.encode() not in everything
    await images.close()


async def test_an_archive_goes_through_the_converters_index(tmp_path: Path, registry: RunningRegistry) -> None:
    pushed = push(registry, "team/export", "1", [tar_of({"a": b"a" * 5000})])
    name = f"{registry.host}/team/export:1"
    images = await opened(tmp_path / "one")
    await images.ensure(name, owner=OWNER)
    data = b"".join([piece async for piece in images.export(name, OWNER)])
    await images.close()
    second = await opened(tmp_path / "two")
    (view,) = await second.import_archive(pieces(data), owner=OWNER)
    assert (view.digest, view.names) == (pushed.digest, [name])
    assert (await second.fsck()).problems == []
    with pytest.raises(ClocheError) as refused:
        await second.import_archive(pieces(b"\x1f\x8b" + bytes(2000)), owner=OWNER)
    assert refused.value.code == "image_refused"
    await second.close()


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
async def test_a_docker_archive_of_skopeo(tmp_path: Path, registry: RunningRegistry) -> None:
    pushed = push(registry, "team/docker", "1", [tar_of({"a": b"a" * 5000}), tar_of({"b": b"b"})])
    name = f"{registry.host}/team/docker:1"
    target = f"docker-archive:{tmp_path / 'a.tar'}:{name}"
    argv = ["skopeo", "--insecure-policy", "copy", "--src-tls-verify=false", f"docker://{name}", target]
    subprocess.run(argv, check=True, capture_output=True)
    images = await opened(tmp_path / "store")
    (view,) = await images.import_archive(pieces((tmp_path / "a.tar").read_bytes()), owner=OWNER)
    assert (view.names, view.layers) == ([name], len(json.loads(pushed.body)["layers"]))
    assert (await images.fsck()).problems == []
    await images.close()
