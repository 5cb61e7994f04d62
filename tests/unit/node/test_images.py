"""Images as the node has them: whose they are, what runs of them, and that a create waits for its image once.

The registry, the converter and the agent are real; only the engine has no walls.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cloche.wire import defaults
from cloche.wire.commands import FirstCommand, StartCommand
from cloche.wire.errors import ClocheError
from cloche.wire.images import GcImages, PullImage
from cloche.wire.sandboxes import CreateSandbox, Sandbox
from cloche_server.images.settings import RegistrySettings, Timeouts
from cloche_server.node.admission import Watermarks
from cloche_server.node.making import first_command
from cloche_server.node.node import Config, Node
from cloche_server.node.stock import Stock, stock_of
from tests.unit.images import pushing, registries
from tests.unit.node.house import ADMIN, ME, OTHER, House, make_images, raises, until
from tests.unit.node.local_converter import can_convert, start
from tests.unit.node.native_engine import can_run

pytestmark = [
    pytest.mark.skipif(not can_run() or not can_convert(), reason="needs root and what `just setup` builds"),
    pytest.mark.skipif(not registries.can_run(), reason="needs docker-registry"),
]

QUICK = Timeouts(connect_s=2, retries=0)
PATH = f"PATH={os.environ['PATH']}"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[registries.RunningRegistry]:
    with registries.running(tmp_path_factory.mktemp("registry")) as started:
        layer = pushing.tar_of({"etc/os-release": b"NAME=test\n"})
        plain = {"Cmd": ["sh", "-c", "echo from cmd"], "WorkingDir": "/tmp", "User": "0"}
        pushing.push(started, "plain", "latest", [layer], plain, env=[PATH, "FROM_IMAGE=yes"])
        entry = {"Entrypoint": ["echo", "entry"], "Cmd": ["cmd"]}
        pushing.push(started, "entry", "latest", [layer], entry, env=[PATH])
        pushing.push(started, "silent", "latest", [layer], {}, env=[PATH])
        huge = {"Cmd": ["true"]}
        pushing.push(
            started, "huge", "latest", [layer], huge, env=[PATH, *(f"BIG{n}={'x' * 60_000}" for n in range(3))]
        )
        yield started


def stock(root: Path, registry: registries.RunningRegistry) -> Stock:
    """Bare names are the test registry's."""
    settings = RegistrySettings(registry.host, QUICK)
    return Stock(root / "images", root / "state" / "images", registries=settings, start=start)


class ImageHouse(House):
    """A node with a registry behind it."""

    def __init__(self, root: Path, registry: registries.RunningRegistry) -> None:
        super().__init__(root, make_images(root))
        config = replace(self.node.config, stock=stock(root, registry))
        self.node.context.journal.close()
        self.node = Node(config, {"gvisor": self.engine}, self.clock)

    async def output(self, box: Sandbox) -> bytes:
        assert box.first_command is not None
        ended = await self.node.wait_command(ME, box.id, box.first_command, 20)
        return await self.text(ended)


@pytest.fixture
async def house(tmp_path: Path, registry: registries.RunningRegistry) -> AsyncIterator[ImageHouse]:
    made = ImageHouse(tmp_path, registry)
    await made.node.start()
    yield made
    await made.node.kill_all(ADMIN)
    await made.node.stop()


async def pull(node: Node, image: str) -> list[str]:
    return [event.kind async for event in node.pull_image(ME, PullImage(image=image))]


@pytest.mark.req("IMG-1")
async def test_what_runs_is_what_the_image_says_and_its_digest_is_kept(house: ImageHouse) -> None:
    box = await house.create(image="plain", command=FirstCommand())
    view = await house.node.inspect_image(ME, "plain")
    assert (box.image, box.image_digest, box.user, box.workdir) == ("plain", view.digest, "0", "/tmp")
    assert await house.output(box) == b"from cmd\n"
    shown = await house.run(box.id, "sh", "-c", "echo $FROM_IMAGE; pwd")
    assert await house.text(shown) == b"yes\n/tmp\n", (
        "exec has the image's environment and directory, and no entrypoint"
    )
    (creating,) = [
        line for line in (await house.node.events(ME, box.id, after=0, limit=100)).events if "creating" in line.kind
    ]
    assert (creating.detail["image"], creating.detail["image_name"]) == (view.digest, "plain")
    assert (await house.node.inspect_image(ME, "plain")).in_use == 1
    await raises("image_in_use", house.node.remove_image(ADMIN, "plain"))
    assert (await house.node.gc_images(ADMIN, GcImages(max_bytes=0))).images == []
    await house.node.kill(ME, box.id)
    await house.node.remove_image(ADMIN, "plain")
    assert (await house.node.fsck_images(ADMIN, repair=False)).problems == []


@pytest.mark.req("IMG-1")
async def test_the_entrypoint_is_dockers(house: ImageHouse) -> None:
    def asked(*argv: str, **more: object) -> dict[str, object]:
        return {"image": "entry", "command": FirstCommand(argv=list(argv)), **more}

    assert await house.output(await house.create(**asked())) == b"entry cmd\n"
    assert await house.output(await house.create(**asked("a", "b"))) == b"entry a b\n"
    assert await house.output(await house.create(**asked("echo", "x", entrypoint=[]))) == b"x\n"
    assert await house.output(await house.create(**asked(entrypoint=["echo", "mine"]))) == b"mine\n"
    refused = await raises("invalid_request", house.create(image="silent", command=FirstCommand()))
    assert "does not say what to run" in refused.message
    assert (await house.create(image="silent")).user is None, "no user in the image is root, as for Docker"


@pytest.mark.req("IMG-1")
async def test_a_hostile_config_is_refused_by_name(house: ImageHouse) -> None:
    refused = await raises("image_refused", house.create(image="huge"))
    assert refused.detail == {"reason": "environment"}
    await raises("too_large", house.create(image="plain", env={f"V{n}": "x" * 100_000 for n in range(2)}))
    assert house.node.context.store.sandboxes() == []


@pytest.mark.req("IMG-3")
async def test_many_creates_of_an_absent_image_pull_it_once_and_one_key_makes_one_sandbox(house: ImageHouse) -> None:
    request = CreateSandbox(image="plain", limits={"disk_bytes": 1 << 24})  # type: ignore[arg-type]
    with_key = [house.node.create(ME, request, "key") for _ in range(4)]
    without = [house.node.create(ME, request, None) for _ in range(6)]
    boxes = await asyncio.gather(*with_key, *without)
    assert len({box.id for box in boxes[:4]}) == 1
    assert len({box.id for box in boxes}) == 7
    roots = list((house.root / "state" / "images" / "roots").glob("*.erofs"))
    assert len(roots) == 1
    assert (await house.node.inspect_image(ME, "plain")).in_use == 7


@pytest.mark.req("IMG-1")
async def test_never_and_always(house: ImageHouse, registry: registries.RunningRegistry) -> None:
    refused = await raises("image_not_found", house.create(image="plain", pull="never"))
    assert refused.detail["image"] == "plain", "whoever asked knows what to pull"
    assert (await pull(house.node, "plain"))[-1] == "done"
    first = (await house.create(image="plain", pull="never")).image_digest
    layer = pushing.tar_of({"new": b"new"})
    pushing.push(registry, "moved", "latest", [layer], {"Cmd": ["true"]}, env=[PATH])
    before = (await house.create(image="moved")).image_digest
    pushing.push(registry, "moved", "latest", [layer, layer], {"Cmd": ["false"]}, env=[PATH])
    assert (await house.create(image="moved")).image_digest == before, "what is here is taken"
    assert (await house.create(image="moved", pull="always")).image_digest != before
    assert first is not None


@pytest.mark.req("ISO-3")
async def test_what_one_imported_another_does_not_see(house: ImageHouse) -> None:
    await pull(house.node, "plain")
    parts = [part async for part in house.node.export_image(ME, "plain")]

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    events = [event async for event in house.node.import_image(ME, body(), "mine:1")]
    assert events[-1].kind == "done"
    assert events[-1].view is not None
    assert any(name.endswith("/mine:1") for name in events[-1].view.names)
    seen = {name.rpartition("/")[2] for view in await house.node.list_images(OTHER) for name in view.names}
    assert seen == {"plain:latest", "python"}
    request = CreateSandbox(image="mine:1", pull="never", limits={"disk_bytes": 1 << 24})  # type: ignore[arg-type]
    await raises("image_not_found", house.node.create(OTHER, request, None))
    await raises("image_not_found", house.node.inspect_image(OTHER, "mine:1"))
    await raises("image_not_found", house.node.remove_image(OTHER, "mine:1"))
    await raises("image_not_found", _all(house.node.export_image(OTHER, "mine:1")))
    assert (await house.node.create(ME, request, None)).image == "mine:1"
    await raises("forbidden", house.node.remove_image(ME, "plain"))


async def _all(parts: AsyncIterator[bytes]) -> list[bytes]:
    return [part async for part in parts]


@pytest.mark.req("IMG-3")
async def test_a_second_node_on_the_same_store_is_refused(house: ImageHouse, tmp_path: Path) -> None:
    config = Config(tmp_path / "second", tmp_path / "images", stock=house.node.config.stock)
    second = Node(config, {"gvisor": house.engine})
    refused = await raises("store_busy", second.start())
    assert str(tmp_path / "state" / "images") in refused.message
    assert "--store" in refused.fix
    second.context.journal.close()


async def test_who_leaves_a_pull_gives_it_up(house: ImageHouse) -> None:
    events = house.node.pull_image(ME, PullImage(image="plain"))
    assert (await anext(events)).kind == "resolved"
    await events.aclose()  # type: ignore[attr-defined]
    assert await house.node.list_images(ADMIN) == [await house.node.inspect_image(ME, "python")]
    assert (await pull(house.node, "plain"))[-1] == "done"
    with pytest.raises(ClocheError) as failed:
        await pull(house.node, "no/such")
    assert failed.value.code == "image_not_found"


def test_the_default_image(tmp_path: Path) -> None:
    def default(**environ: str) -> str:
        return stock_of(tmp_path, tmp_path / "store", tmp_path / "config", start, environ).default_image

    assert default() == defaults.IMAGE == "python:3.12-slim"
    (tmp_path / "python.erofs").touch()
    assert default() == "python"
    assert default(CLOCHE_IMAGE="team/app:1") == "team/app:1"


def test_a_policy_that_is_named_must_be_there(tmp_path: Path) -> None:
    for name in ("CLOCHE_TRUST", "CLOCHE_REGISTRIES"):
        with pytest.raises(ClocheError) as refused:
            stock_of(tmp_path, tmp_path, tmp_path, start, {name: str(tmp_path / "nowhere.toml")})
        assert refused.value.code == "invalid_request"


def test_the_first_command_is_bounded() -> None:
    from cloche_server.images.service import Root

    root = Root("x", "x.erofs", None, None, None, {}, entrypoint=tuple("a" * 5000))
    with pytest.raises(ClocheError) as refused:
        first_command(CreateSandbox(command=StartCommand(argv=["x"])), root)
    assert refused.value.detail == {"reason": "entrypoint"}


@pytest.mark.req("RES-1")
async def test_for_want_of_disk_what_nobody_needs_of_images_goes(house: ImageHouse) -> None:
    await pull(house.node, "plain")
    left = house.root / "state" / "images" / "tmp" / "partial" / ("0" * 64)
    left.write_bytes(b"a download that stopped")
    roomy, house.node._maker.marks = house.node._maker.marks, Watermarks(disk_free_bytes_min=1 << 60)
    refused = await raises("overloaded", house.create(image="plain"))
    assert refused.detail == {"watermark": "disk"}
    await until(lambda: not left.exists())
    house.node._maker.marks = roomy
    assert (await house.create(image="plain")).image == "plain", "an image with a name stays"
