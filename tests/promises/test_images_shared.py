"""One root for all sandboxes of an image: fetched once, made once, read by all, written by none, removed when nobody runs."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from cloche.client import Sandbox
from cloche.errors import ClocheError
from cloche_server.node.launch.places import NodePaths
from cloche_server.node.launch.up import up
from tests.promises.nodes import RealNode
from tests.promises.pictures import (
    MIRROR_PREFIX,
    Between,
    assert_whole,
    between,
    layer,
    mirror,
    picture_node,
    planted_picture_node,
    program,
    roots,
    run_output,
)
from tests.promises.raw_api import ask
from tests.unit.images import registries
from tests.unit.images.pushing import push, sha256
from tests.unit.images.registries import RunningRegistry

pytestmark = [
    pytest.mark.req("IMG-3"),
    pytest.mark.skipif(not registries.can_run(), reason="needs docker-registry"),
    pytest.mark.timeout(240),
]

AT_ONCE = 20
CONFIG = {"Entrypoint": ["/tool"]}
NOISE = random.Random(3).randbytes(3 << 20)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    with registries.running(tmp_path_factory.mktemp("registry")) as started:
        layers = [layer({"tool": program("tool")}), layer({"noise": NOISE, "word": b"the image's"})]
        push(started, MIRROR_PREFIX + "shared", "1", layers, CONFIG)
        push(started, MIRROR_PREFIX + "other", "1", layers[:1], CONFIG)
        yield started


@pytest.fixture(scope="module")
def proxy(registry: RunningRegistry) -> Iterator[Between]:
    with between(registry.url) as made:
        yield made


@pytest.fixture(scope="module")
def node(proxy: Between) -> Iterator[RealNode]:
    with picture_node(mirror(proxy.url)) as made:
        yield made


def code_of(failed: pytest.ExceptionInfo[ClocheError]) -> str:
    return failed.value.code


@pytest.mark.req("ISO-3")
def test_twenty_creates_at_once_are_one_pull_one_conversion_and_twenty_sandboxes(proxy: Between) -> None:
    with planted_picture_node(mirror(proxy.url)) as node, ExitStack() as ending:
        node.die_at("images.convert.asked", 2)  # the daemon dies if it asks for a second conversion
        proxy.forget()

        def create(number: int) -> Sandbox:
            """By the SDK, which asks for the pull itself, or by the API, where the node pulls what is missing."""
            client = ending.enter_context(node.client(request_timeout_s=120))
            if number % 2:
                return Sandbox.create("shared:1", memory_mb=64, disk_mb=64, node=client)
            limits = {"memory_bytes": 64 << 20, "disk_bytes": 64 << 20}
            status, made = ask(node, "POST", "/v1/sandboxes", body={"image": "shared:1", "limits": limits})
            assert status == 201, made
            return client.connect(made["id"])

        with ThreadPoolExecutor(AT_ONCE) as pool:
            boxes = list(pool.map(create, range(AT_ONCE)))
        assert not (node.plant / "taken").exists(), "one conversion"
        assert (node.plant / "fault").exists()
        fetched = [asked.path for asked in proxy.blobs()]
        assert len(fetched) == len(set(fetched)) == 3, "the config and two layers, once"
        assert len(roots(node)) == 1
        assert len({box.id for box in boxes}) == AT_ONCE
        (digest,) = {box.view.image_digest for box in boxes}
        with node.client() as client:
            assert client.images.inspect("shared:1").in_use == AT_ONCE
            assert client.images.inspect("shared:1").digest == digest
        for number, box in enumerate(boxes):
            assert box.files.read("/word") == b"the image's", "nobody's but the image's"
            box.files.write("/word", f"of {number}")
            box.files.write(f"/mine-{number}", b"x")
        for number, box in enumerate(boxes):
            assert box.files.read("/word") == f"of {number}".encode()
            names = [entry.path for entry in box.files.list("/") if entry.path.startswith("/mine-")]
            assert names == [f"/mine-{number}"]
            assert sha256(box.files.read("/noise")) == sha256(NOISE)
        assert_whole(node)


def test_what_runs_is_neither_removed_nor_collected(node: RealNode) -> None:
    with node.client() as client:
        with node.sandbox(image="shared:1", memory_mb=64) as box:
            client.images.pull("other:1")
            for name in ("shared:1", str(box.view.image_digest)):
                with pytest.raises(ClocheError) as failed:
                    client.images.remove(name)
                assert code_of(failed) == "image_in_use"
            done = node.cloche("image", "rm", "shared:1")
            assert (done.returncode, done.stderr.startswith("✗ image_in_use: ".encode())) == (125, True)
            node.restart_daemon()
            result = client.images.gc(max_bytes=0, max_age_s=0)
            assert len(result.images) == 1, "the other one"
            assert len(roots(node)) == 1
            assert sha256(client.connect(box.id).files.read("/noise")) == sha256(NOISE)
            assert run_output(node, "shared:1", "more").startswith("more ")
            assert_whole(node)
        result = client.images.gc(max_bytes=0)
        assert [len(result.images), result.roots, roots(node)] == [1, 1, []]
        assert list((node.paths.store / "blobs/sha256").iterdir()) == []
        assert result.bytes > 0
        assert run_output(node, "shared:1", "again").startswith("again ")
        client.images.remove("shared:1")
        assert_whole(node)


def test_two_images_share_their_layers(node: RealNode, proxy: Between) -> None:
    with node.client() as client:
        client.images.pull("other:1")
        proxy.forget()
        client.images.pull("shared:1")
        assert len(proxy.blobs()) == 2, "its config and the layer that the other one has not"
        client.images.remove("other:1")
        assert run_output(node, "shared:1", "whole").startswith("whole ")
    assert_whole(node)


@pytest.mark.req("ISO-3")
def test_nobody_in_a_sandbox_writes_to_the_root(node: RealNode) -> None:
    with node.client() as client:
        view = client.images.pull("shared:1")
        (file,) = [path for path in roots(node) if path.stat().st_size == view.root_bytes]
        before = sha256(file.read_bytes())
        with node.sandbox(image="shared:1", memory_mb=64, user="0", privileges="package-install") as box:
            box.files.write("/noise", b"gone")
            box.files.write("/tool", b"no program")
            assert box.commands.run(["/tool"]).ended == "not_started"
        assert sha256(file.read_bytes()) == before
        assert file.stat().st_mode & 0o777 == 0o444
    with node.sandbox(image="shared:1", memory_mb=64) as box:
        assert sha256(box.files.read("/noise")) == sha256(NOISE)
        assert box.commands.run(["/tool", "runs"]).stdout.startswith("runs ")


def test_a_second_node_on_the_same_store_is_refused(node: RealNode) -> None:
    base = node.base / "second"
    base.mkdir(mode=0o755)
    before = sorted(os.listdir(node.paths.store))
    with pytest.raises(ClocheError) as failed:
        up(
            NodePaths(base / "state", base / "run", node.paths.images, node.paths.store, base / "config"),
            mode=node.mode,
        )
    assert code_of(failed) == "store_busy"
    assert "--store" in failed.value.fix
    assert sorted(os.listdir(node.paths.store)) == before
    assert run_output(node, "shared:1", "goes on").startswith("goes on ")
