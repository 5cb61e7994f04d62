"""Killed at any step of a pull, a conversion, an import, a build, a removal or a collection, the store is whole.

Each case runs in a process of its own that kills itself at a named point (or is killed at a random moment). Then the store
is opened again: fsck finds nothing, nothing is orphaned, what was acknowledged is there, and the same work succeeds.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cloche_server import points
from cloche_server.images.build.protocols import Cached
from cloche_server.images.layout import POINTS, Layout
from cloche_server.images.service import Images
from tests.unit.images.plain_parts import HOST, MemoryRegistry, left_in_tmp, open_images, pieces
from tests.unit.images.pushing import gzipped, sha256, tar_of

OLD, NEW, BROUGHT, BUILT = f"{HOST}/old:1", f"{HOST}/new:1", f"{HOST}/brought:1", f"{HOST}/built:1"
OWNER = "uid:1"
Work = Callable[[Path], Coroutine[Any, Any, None]]


def registry() -> MemoryRegistry:
    here = MemoryRegistry()
    here.add(OLD, [tar_of({"common": b"c" * 5000}), tar_of({"old": b"o"})])
    here.add(NEW, [tar_of({"common": b"c" * 5000}), tar_of({"new": random.Random(1).randbytes(200_000)})])
    return here


async def opened(directory: Path, agent: bytes = b"agent") -> Images:
    return await open_images(directory, registry(), agent=agent)


async def pull(directory: Path) -> None:
    images = await opened(directory)
    await images.ensure(NEW, owner=OWNER)
    await images.close()


async def convert(directory: Path) -> None:
    images = await opened(directory, agent=b"another agent")
    await images.ensure(OLD, owner=OWNER)
    await images.close()


async def bring(directory: Path) -> None:
    images = await opened(directory)
    await images.import_archive(pieces((directory / "archive.tar").read_bytes()), BROUGHT, owner=OWNER)
    await images.close()


async def build(directory: Path) -> None:
    images = await opened(directory)
    raw = tar_of({"made": b"m" * 9000})
    async with images.shelf(OWNER) as shelf:
        base = await shelf.base(OLD)
        fd = shelf.temporary()
        os.write(fd, gzipped(raw))
        layer = await shelf.put_layer(fd, digest=sha256(gzipped(raw)), diff_id=sha256(raw), size=len(gzipped(raw)))
        os.close(fd)
        await shelf.put("step", Cached((layer,), "2024"))
        await shelf.root([*base.layers, layer])
        await shelf.commit([*base.layers, layer], base.config, BUILT)
    await images.close()


async def remove(directory: Path) -> None:
    images = await opened(directory)
    if images.list(OWNER):
        await images.remove(OLD, OWNER, is_admin=True)
    await images.close()


async def collect(directory: Path) -> None:
    images = await opened(directory)
    here = Layout(directory / "images")
    (here.partial / ("0" * 64)).write_bytes(b"half")
    await images.gc(max_bytes=0)
    await images.close()


WORK: dict[str, Work] = {
    "pull": pull,
    "convert": convert,
    "bring": bring,
    "build": build,
    "remove": remove,
    "collect": collect,
}
GOES = ("remove", "collect")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the old image, and an archive."""
    directory = tmp_path_factory.mktemp("template")

    async def prepare() -> None:
        images = await opened(directory)
        await images.ensure(OLD, owner=OWNER)
        await images.pull(NEW, owner=OWNER)
        archive = b"".join([piece async for piece in images.export(NEW, OWNER)])
        (directory / "archive.tar").write_bytes(archive)
        await images.remove(NEW, OWNER, is_admin=True)
        await images.close()

    asyncio.run(prepare())
    return directory


def in_a_child(work: Callable[[], Coroutine[Any, Any, None]], reached: Callable[[str], None]) -> int:
    """The process's id. It ends with 0 when the work is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        points.reached = reached
        asyncio.run(work())
        os._exit(0)
    except BaseException:  # whatever it was, this process must not go on as a second test run
        traceback.print_exc()
        os._exit(1)


def killer(point: str, passing: int) -> Callable[[str], None]:
    left = [passing]

    def reached(at: str) -> None:
        left[0] -= at == point
        if at == point and left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return reached


def was_struck(pid: int) -> bool:
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the work itself failed"
    return os.WIFSIGNALED(status)


async def assert_whole(directory: Path, what: str, *, old_stays: bool) -> None:
    images = await opened(directory)
    try:
        report = await images.fsck()
        assert report.problems == [], what
        assert all(path.startswith("partial/") for path in left_in_tmp(directory)), what
        if old_stays:
            root = await images.ensure(OLD, owner=OWNER, pull="never")
            assert (directory / "images" / root.file).read_bytes().startswith(b"ROOT"), what
        assert not await asyncio.to_thread(_has_unfinished_roots, directory), what
    finally:
        await images.close()


def _has_unfinished_roots(directory: Path) -> bool:
    roots = Layout(directory / "images").roots
    return {path.stem for path in roots.glob("*.json")} != {path.stem for path in roots.glob("*.erofs")}


@pytest.mark.req("IMG-3")
@pytest.mark.parametrize("name", sorted(WORK))
def test_killed_at_every_point(tmp_path: Path, template: Path, name: str, long_run: bool) -> None:
    """CI: the first passing of each point; --long: every passing."""
    work, struck = WORK[name], 0
    for point in POINTS:
        for passing in range(1, 100 if long_run else 2):
            directory = tmp_path / f"{point}-{passing}"
            shutil.copytree(template, directory)
            if not was_struck(in_a_child(lambda: work(directory), killer(point, passing))):  # noqa: B023
                shutil.rmtree(directory)
                break
            struck += 1
            what = f"{name} killed at {point}, passing {passing}"
            asyncio.run(assert_whole(directory, what, old_stays=name not in GOES))
            asyncio.run(work(directory))
            asyncio.run(assert_whole(directory, f"{what}, done again", old_stays=name not in GOES))
            shutil.rmtree(directory)
    assert struck >= {"convert": 5, "remove": 4, "collect": 6}.get(name, 8), "points were not passed"


@pytest.mark.req("IMG-3")
def test_every_point_is_passed_by_some_work(tmp_path: Path, template: Path) -> None:
    passed = tmp_path / "passed"

    def note(point: str) -> None:
        with passed.open("a") as file:
            file.write(point + "\n")

    for name, work in WORK.items():
        directory = tmp_path / name
        shutil.copytree(template, directory)
        assert not was_struck(in_a_child(lambda: work(directory), note))  # noqa: B023
    assert set(POINTS) == set(passed.read_text().split())


@pytest.mark.req("IMG-3")
def test_killed_at_random_moments(tmp_path: Path, template: Path, seed: int, long_run: bool) -> None:
    chance = random.Random(seed)
    directory = tmp_path / "store"
    shutil.copytree(template, directory)

    async def everything() -> None:
        while True:
            for each in (pull, bring, build, convert):
                await each(directory)
            images = await opened(directory)
            for view in images.list(OWNER, is_admin=True):
                if OLD not in view.names:
                    await images.remove(view.digest, OWNER, is_admin=True)
            await images.gc(max_age_s=0 if chance.random() < 0.1 else None)
            await images.close()
            await images_with_old(directory)

    async def images_with_old(directory: Path) -> None:
        images = await opened(directory)
        await images.ensure(OLD, owner=OWNER)
        await images.close()

    for number in range(50 if long_run else 4):
        pid = in_a_child(everything, lambda _: None)
        time.sleep(chance.uniform(0.0, 0.6))  # sleep: the moment of the kill is what is tried
        os.kill(pid, signal.SIGKILL)
        assert was_struck(pid)
        what = f"CLOCHE_TEST_SEED={seed}, kill {number}"
        asyncio.run(assert_whole(directory, what, old_stays=False))
        for each in (pull, bring, build, images_with_old):
            asyncio.run(each(directory))
        asyncio.run(assert_whole(directory, what, old_stays=True))
