"""What a name means is asked of a real registry, and what comes is what its digest says; else nothing comes."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cloche.errors import ClocheError
from tests.promises.nodes import RealNode, real_node
from tests.promises.pictures import (
    LOGIN,
    MIRROR_PREFIX,
    Between,
    asking,
    assert_whole,
    between,
    layer,
    mirror,
    picture_node,
    program,
    refused,
    roots,
    run_output,
)
from tests.unit.images import registries
from tests.unit.images.pushing import Pushed, push, push_index, sha256
from tests.unit.images.registries import RunningRegistry

pytestmark = [
    pytest.mark.req("IMG-1"),
    pytest.mark.skipif(not registries.can_run(), reason="needs docker-registry"),
    pytest.mark.timeout(240),
]

MIB = 1 << 20
CONFIG = {"Entrypoint": ["/tool"]}
OTHER_PLATFORM = "linux/riscv64"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    with registries.running(tmp_path_factory.mktemp("registry")) as started:
        yield started


@pytest.fixture(scope="module")
def proxy(registry: RunningRegistry) -> Iterator[Between]:
    with between(registry.url) as made:
        yield made


@pytest.fixture(scope="module")
def node(proxy: Between) -> Iterator[RealNode]:
    """The registry is the mirror of its default registry."""
    with picture_node(mirror(proxy.url)) as made:
        yield made


def image(registry: RunningRegistry, name: str, tag: str | None, word: str, **more: object) -> Pushed:
    """One program and the file `/word`."""
    return push(registry, name, tag, [layer({"tool": program("tool")}), layer({"word": word.encode()})], CONFIG, **more)  # type: ignore[arg-type]


def word_in(node: RealNode, name: str, **more: object) -> str:
    with node.sandbox(image=name, memory_mb=64, **more) as box:
        return box.files.read("/word").decode()


def test_by_tag_by_digest_and_by_both(node: RealNode, registry: RunningRegistry, proxy: Between) -> None:
    old = image(registry, MIRROR_PREFIX + "plain", "1", "old")
    new = image(registry, MIRROR_PREFIX + "plain", "latest", "new")
    with node.client() as client:
        assert client.images.pull("plain").digest == new.digest
        assert client.images.pull("plain:1").digest == old.digest
        proxy.forget()
        assert client.images.pull(f"plain@{old.digest}").digest == old.digest
        assert client.images.pull(f"plain:1@{old.digest}").digest == old.digest
        assert proxy.blobs() == [], "what is here is not fetched again"
        for name in ("plain:2", f"plain@sha256:{'0' * 64}"):
            assert refused(node, f"{registry.host}/{MIRROR_PREFIX}{name}").code == "image_not_found"
    assert word_in(node, f"plain@{old.digest}") == "old"
    assert word_in(node, "plain:1") == "old"
    assert word_in(node, "plain") == "new"


def test_the_digest_that_ran_is_in_the_view_and_in_the_journal(node: RealNode, registry: RunningRegistry) -> None:
    pushed = image(registry, MIRROR_PREFIX + "journalled", "1", "x")
    with node.sandbox(image="journalled:1", memory_mb=64) as box, node.client() as client:
        assert (box.view.image, box.view.image_digest) == ("journalled:1", pushed.digest)
        events = client.events(box.id, limit=1000).events
    (began,) = [event.detail for event in events if event.kind == "sandbox.creating"]
    assert (began["image"], began["image_name"]) == (pushed.digest, "journalled:1")
    (over,) = [
        each for each in json.loads(node.cloche("ps", "-a", "--json").stdout)["sandboxes"] if each["id"] == box.id
    ]
    assert over["image_digest"] == pushed.digest, "also of one that is over"


def test_an_index_gives_this_machine_s_image_and_another_when_asked(node: RealNode, registry: RunningRegistry) -> None:
    name = MIRROR_PREFIX + "many"
    here = image(registry, name, None, "here")
    there = image(registry, name, None, "there", platform=OTHER_PLATFORM)
    index = push_index(registry, name, "1", {OTHER_PLATFORM: there, "linux/amd64": here})
    only = push_index(registry, name, "elsewhere", {OTHER_PLATFORM: there})
    with node.client() as client:
        assert client.images.pull("many:1").digest == here.digest
        view = client.images.pull("many:1", platform=OTHER_PLATFORM)
        assert (view.digest, view.platform) == (there.digest, OTHER_PLATFORM)
        assert client.images.pull(f"many@{index.digest}").digest == here.digest
        exported = b"".join(client.images.export_parts(f"many@{there.digest}"))
        assert there.digest.removeprefix("sha256:").encode() in exported
    failed = refused(node, f"{registry.host}/{name}@{only.digest}")
    assert failed.code == "image_not_found"
    assert OTHER_PLATFORM in str(failed.detail) + failed.message
    assert word_in(node, "many:1") == "here"


@pytest.mark.req("ISO-3")
def test_a_private_image_needs_its_password_which_is_kept_nowhere(tmp_path: Path) -> None:
    with registries.running(tmp_path, basic=True) as registry:
        pushed = image(registry, "team/private", "1", "secret")
        name = f"{registry.host}/team/private:1"
        with picture_node("") as node, node.client() as client:
            assert refused(node, name).code == "registry_denied"
            wrong = LOGIN.model_copy(update={"password": "wrong"})
            failed = refused(node, name, wrong)
            assert failed.code == "registry_denied"
            assert "wrong" not in str(failed.detail) + failed.message
            view = client.images.pull(name, credentials=LOGIN)
            assert (view.digest, view.private) == (pushed.digest, True)
            assert word_in(node, name) == "secret"
            logged = b"".join(path.read_bytes() for path in node.paths.state.rglob("*") if path.is_file())
            assert registries.PASSWORD.encode() not in logged, "a password is nowhere on the disk"


def test_a_registry_with_an_authority_of_its_own(tmp_path: Path) -> None:
    ours, theirs = registries.Ca.make(tmp_path, "ours"), registries.Ca.make(tmp_path, "theirs")
    with registries.running(tmp_path, ca=ours) as registry:
        pushed = image(registry, "tls", "1", "behind TLS")
        name = f"{registry.host}/tls:1"
        with picture_node("") as node:
            failed = refused(node, name)
            assert failed.code == "registry_unreachable", "an unknown authority"
        for authority, is_right in ((theirs, False), (ours, True)):
            with asking(f'[registry."{registry.host}"]\nca_file = "ca.pem"\n') as folder:
                shutil.copyfile(authority.file, folder / "ca.pem")
                (folder / "ca.pem").chmod(0o644)
                with real_node() as node, node.client() as client:
                    if is_right:
                        assert client.images.pull(name).digest == pushed.digest
                        assert word_in(node, name) == "behind TLS"
                    else:
                        assert refused(node, name).code == "registry_unreachable"


def test_a_layer_that_was_damaged_on_the_registry_s_disk_is_refused(node: RealNode, registry: RunningRegistry) -> None:
    pushed = image(registry, "damaged", "1", "x" * 10_000)
    place = registry.blob_file(sha256(pushed.blobs[1]))
    honest = place.read_bytes()
    before = roots(node)
    name = f"{registry.host}/damaged:1"
    for damaged in (honest[:-40] + bytes([honest[-40] ^ 1]) + honest[-39:], honest[:-1], b""):
        place.write_bytes(damaged)
        failed = refused(node, name)
        assert failed.code == "image_corrupt", failed
        assert roots(node) == before
        with pytest.raises(ClocheError) as caught, node.client() as client:
            client.images.inspect(name)
        assert caught.value.code == "image_not_found", "nothing of it can be seen"
    assert_whole(node)
    place.write_bytes(honest)
    assert word_in(node, name) == "x" * 10_000


def test_a_manifest_that_was_damaged_is_refused(node: RealNode, registry: RunningRegistry) -> None:
    pushed = image(registry, "manifest", "1", "x")
    registry.blob_file(pushed.digest).write_bytes(pushed.body.replace(b"schemaVersion", b"schemaversion"))
    for name in (f"manifest@{pushed.digest}", "manifest:1"):
        assert refused(node, f"{registry.host}/{name}").code in ("image_corrupt", "registry_unreachable")
    assert_whole(node)


def test_a_tag_that_moved_is_not_confused(node: RealNode, registry: RunningRegistry, proxy: Between) -> None:
    first = image(registry, MIRROR_PREFIX + "moving", "1", "first")
    with node.sandbox(image="moving:1", memory_mb=64) as old:
        second = image(registry, MIRROR_PREFIX + "moving", "1", "second")
        proxy.forget()
        with node.sandbox(image="moving:1", memory_mb=64) as same:
            assert same.view.image_digest == first.digest, "what is here is used"
            assert proxy.asked == [], "and the registry is not asked"
        with node.sandbox(image="moving:1", memory_mb=64, pull="always") as new:
            assert new.view.image_digest == second.digest
            assert new.files.read("/word") == b"second"
            assert (old.view.image_digest, old.files.read("/word")) == (first.digest, b"first")
        node.restart_daemon()
        with node.client() as client:
            again = client.connect(old.id)
            assert (again.view.image_digest, again.files.read("/word")) == (first.digest, b"first")
            views = {view.digest: view for view in client.images.list()}
            assert views[first.digest].names == []
            assert any(name.endswith("moving:1") for name in views[second.digest].names)
            client.images.gc(max_bytes=0)
            assert again.files.read("/word") == b"first", "nothing that runs is collected"
        assert word_in(node, f"moving@{first.digest}", pull="never") == "first"


def test_a_pull_that_was_cut_off_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The registry dies in the middle of a layer; another one, of the same data, serves the rest."""
    noise = random.Random(4).randbytes(24 * MIB)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    settings = "[timeouts]\nretries = 1\n"
    with ExitStack() as life, ExitStack() as rest:
        registry = life.enter_context(registries.running(first))
        proxy = rest.enter_context(between(registry.url))
        node = rest.enter_context(picture_node(settings))
        big = layer({"noise": noise})
        pushed = push(registry, "big", "1", [layer({"tool": program("tool")}), big], CONFIG)
        size, digest = len(pushed.blobs[1]), sha256(pushed.blobs[1])
        failures: list[ClocheError] = []
        proxy.stop_at = 16 * MIB
        pulling = threading.Thread(target=lambda: failures.append(refused(node, f"{proxy.host}/big:1")))
        pulling.start()
        proxy.wait_stopped()
        (first / "data").rename(second / "data")
        life.close()
        proxy.stop_at = None
        proxy.go.set()
        pulling.join()
        assert [failed.code for failed in failures] == ["registry_unreachable"]
        assert roots(node) == []
        assert_whole(node)
        node.restart_daemon()
        with registries.running(second) as successor, node.client() as client:
            proxy.upstream = successor.url
            proxy.forget()
            assert client.images.pull(f"{proxy.host}/big:1").digest == pushed.digest
            again = sum(asked.bytes for asked in proxy.blobs(digest))
            with capsys.disabled():
                print(f" [{again / MIB:.1f} of {size / MIB:.1f} MiB fetched again]", end="")
            assert 0 < again <= size - 12 * MIB
            assert all(asked.range for asked in proxy.blobs(digest))
            assert list((node.paths.store / "tmp/partial").iterdir()) == []
            with node.sandbox(image=f"{proxy.host}/big:1", memory_mb=64) as box:
                assert sha256(box.files.read("/noise")) == sha256(noise)
            assert run_output(node, f"{proxy.host}/big:1", "runs").startswith("runs ")
        assert_whole(node)
