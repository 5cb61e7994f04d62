"""The daemon is killed at each step of a pull, a conversion, an import and a collection, and at any moment in between.

The next daemon finds a store that is whole, ends what the dead one had begun, and the same work succeeds.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from cloche_server.images.layout import POINTS
from tests.promises.nodes import wait_until
from tests.promises.pictures import (
    MIRROR_PREFIX,
    assert_whole,
    layer,
    left_in_tmp,
    mirror,
    planted_picture_node,
    program,
    roots,
    run_output,
)
from tests.promises.plants import PlantedNode, guest_processes
from tests.unit.images import registries
from tests.unit.images.pushing import Pushed, push
from tests.unit.keeper.harness import _cgroup_dirs

pytestmark = [
    pytest.mark.req("IMG-3"),
    pytest.mark.req("LIF-6"),
    pytest.mark.skipif(not registries.can_run(), reason="needs docker-registry"),
    pytest.mark.skipif(os.getuid() != 0, reason="whose processes are left is told by their ids"),
    pytest.mark.timeout(1800),
]

PULL = {
    "images.pull.resolved": 1,
    "images.blob.after_partial": 3,
    "images.blob.before_link": 4,
    "images.blob.after_link": 4,
    "images.convert.asked": 1,
    "images.convert.answered": 1,
    "images.root.before_link": 1,
    "images.root.after_link": 1,
    "images.root.after_record": 1,
    "images.image.before_record": 1,
    "images.image.after_record": 1,
    "images.name.after_record": 1,
}
"""How often one pull passes each."""
BRING = {"images.import.received": 1, "images.import.indexed": 1}
COLLECT = {
    "images.gc.after_partials": 1,
    "images.gc.after_unreferenced": 1,
    "images.remove.after_image": 2,
    "images.remove.after_name": 2,
    "images.remove.after_root": 2,
    "images.remove.after_blobs": 2,
}
CONFIG = {"Entrypoint": ["/tool"]}
LONG_COUNT, CI_COUNT = 50, 3
NAMES = ("one:1", "two:1")


class Crashing:
    """A node, two images that share a layer, and an archive of one."""

    def __init__(self, node: PlantedNode, images: dict[str, Pushed], directory: Path) -> None:
        self.node = node
        self.images = images
        self.archive = directory / "one.tar"
        self.pull_s = 0.0

    def post(self, path: str, **request: object) -> bool:
        """Whether the daemon lived to answer."""
        transport = httpx2.HTTPTransport(uds=str(self.node.paths.api_socket))
        with httpx2.Client(transport=transport, timeout=60) as client:
            try:
                answer = client.post(f"http://cloche/v1/images/{path}", **request)  # type: ignore[arg-type]
            except httpx2.TransportError:
                return False
        assert answer.status_code == 200, answer.text
        return True

    def pull(self) -> bool:
        return self.post("pull", json={"image": "one:1"})

    def bring(self) -> bool:
        return self.post("import", params={"name": "brought:1"}, content=self.archive.read_bytes())

    def collect(self) -> bool:
        return self.post("gc", json={"max_bytes": 0})

    def fill(self) -> None:
        """Something to collect."""
        with self.node.client() as client:
            for name in NAMES:
                assert client.images.pull(name).digest == self.images[name].digest
        (self.node.paths.store / "tmp/partial" / ("0" * 64)).write_bytes(b"half of something")

    def clear(self) -> None:
        with self.node.client() as client:
            client.images.gc(max_bytes=0)
        assert roots(self.node) == []

    def check_after_death(self) -> None:
        """The daemon is dead; the next one tidies up."""
        node = self.node
        left = guest_processes(node)
        groups = {path for pid in left for path in _groups(pid)}
        node.start()
        wait_until(lambda: not guest_processes(node), what="the end of the converter of the dead daemon")
        wait_until(lambda: not groups & {path.name for path in _cgroup_dirs()}, what="the end of its cgroup")
        assert left_in_tmp(node) == []
        assert_whole(node)
        with node.client() as client:
            assert client.images.pull("one:1").digest == self.images["one:1"].digest
            assert client.images.fsck().problems == []
        assert len(roots(node)) >= 1
        assert list((node.paths.store / "tmp/partial").glob("[1-9a-f]*")) == [], "every download was gone on with"


def _groups(pid: int) -> set[str]:
    """The names of the cgroups that a process is in."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {line.rpartition("/")[2] for line in lines} - {""}


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashing]:
    directory = tmp_path_factory.mktemp("registry")
    common = layer({"tool": program("tool")})
    with registries.running(directory) as registry:
        images = {
            name: push(
                registry,
                MIRROR_PREFIX + name.partition(":")[0],
                "1",
                [common, layer({"noise": random.Random(name).randbytes(2 << 20)})],
                CONFIG,
            )
            for name in NAMES
        }
        with planted_picture_node(mirror(registry.url)) as node:
            made = Crashing(node, images, directory)
            with node.client() as client:
                started = time.monotonic()
                client.images.pull("one:1")
                made.pull_s = time.monotonic() - started
                made.archive.write_bytes(b"".join(client.images.export_parts("one:1")))
            made.clear()
            yield made
            assert run_output(node, "one:1", "after", "all").startswith("after all ")


def chosen(points: dict[str, int], rng: random.Random, count: int) -> list[tuple[str, int]]:
    """Points and which passing of them: each point once before one comes again."""
    order: list[str] = []
    while len(order) < count:
        order += rng.sample(sorted(points), len(points))
    return [(point, rng.randint(1, points[point])) for point in order[:count]]


def struck(crashing: Crashing, point: str, passing: int, act: Callable[[], bool]) -> None:
    crashing.node.die_at(point, passing)
    assert not act(), f"it lived through {point} {passing}"
    crashing.node.wait_struck()
    crashing.check_after_death()


def test_every_point_is_one_of_these() -> None:
    assert set(POINTS) <= {*PULL, *BRING, *COLLECT}


@pytest.mark.req("IMG-1")
def test_killed_at_a_step_of_a_pull_or_a_conversion(crashing: Crashing, seed: int, long_run: bool) -> None:
    for point, passing in chosen(PULL, random.Random(seed), LONG_COUNT if long_run else CI_COUNT + 1):
        print(f"{point} {passing}")
        crashing.clear()
        struck(crashing, point, passing, crashing.pull)


def test_killed_at_a_step_of_an_import(crashing: Crashing, seed: int, long_run: bool) -> None:
    wanted = BRING | {point: 1 for point in PULL if not point.startswith(("images.pull", "images.blob.after_partial"))}
    for point, passing in chosen(wanted, random.Random(seed), LONG_COUNT if long_run else CI_COUNT):
        print(f"{point} {passing}")
        crashing.clear()
        struck(crashing, point, passing, crashing.bring)


def test_killed_at_a_step_of_a_collection(crashing: Crashing, seed: int, long_run: bool) -> None:
    for point, passing in chosen(COLLECT, random.Random(seed), LONG_COUNT if long_run else CI_COUNT):
        print(f"{point} {passing}")
        crashing.fill()
        struck(crashing, point, passing, crashing.collect)


@pytest.mark.parametrize("what", ["pull", "collect"])
def test_killed_at_any_moment(what: str, crashing: Crashing, seed: int, long_run: bool) -> None:
    rng = random.Random(f"{seed} {what}")
    for _ in range(LONG_COUNT if long_run else CI_COUNT):
        longest_s = crashing.pull_s if what == "pull" else crashing.pull_s / 4
        after_s = rng.uniform(0, longest_s)
        print(f"{what}: after {after_s:.3f} of {longest_s:.3f} s")
        crashing.clear() if what == "pull" else crashing.fill()
        working = threading.Thread(target=getattr(crashing, what))
        working.start()
        working.join(after_s)
        crashing.node.kill_daemon()
        working.join()
        crashing.check_after_death()
