"""Rooms for builds, on the native agent: what a step may do, what is copied keeps its owners, and rooms end with their build."""

from __future__ import annotations

import asyncio
import io
import os
import stat
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloche.wire.commands import StartCommand
from cloche_server.node.node import Node
from cloche_server.node.workshop import Room, Workshop, end_leftovers
from tests.unit.node.house import ADMIN, ME, House, make_images, once, raises, until
from tests.unit.node.native_engine import can_run

pytestmark = pytest.mark.skipif(not can_run(), reason="needs root, unshare and a built agent (just setup)")


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path, make_images(tmp_path))
    await made.node.start()
    yield made
    await made.node.kill_all(ADMIN)
    await made.node.stop()


async def no_root() -> str:
    return "python.erofs"


async def open_room(node: Node) -> Room:
    return await Workshop(node._maker, ME, no_root).open(None, disk_bytes=1 << 24, memory_bytes=1 << 28)


async def run(
    room: Room, *argv: str, stdin: bytes | None = None, timeout_s: float = 20, user: str = "0:0"
) -> tuple[int, bytes]:
    said: list[bytes] = []
    code = await room.run(
        argv,
        env={"PATH": os.environ["PATH"]},
        user=user,
        workdir="/",
        stdin=stdin,
        on_output=lambda _fd, data: said.append(data),
        timeout_s=timeout_s,
    )
    return code, b"".join(said)


def tar_of(*entries: tuple[str, bytes | None, int, int]) -> bytes:
    """(name, content or None for a directory, mode, owner)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data, mode, owner in entries:
            info = tarfile.TarInfo(name)
            info.mode, info.uid, info.gid, info.mtime = mode, owner, owner + 1, 1_000_000_000
            info.type = tarfile.REGTYPE if data is not None else tarfile.DIRTYPE
            info.size = len(data or b"")
            tar.addfile(info, io.BytesIO(data or b""))
    return out.getvalue()


@pytest.mark.req("IMG-2")
async def test_steps_and_how_they_end(house: House) -> None:
    room = await open_room(house.node)
    assert await run(room, "sh", "-c", "echo hi; exit 7") == (7, b"hi\n")
    assert await run(room, "sh", "-c", "kill -9 $$") == (137, b"")
    assert await run(room, "cat", stdin=b"x" * 300_000) == (0, b"x" * 300_000)
    assert await run(room, "true", stdin=b"x" * 3_000_000) == (0, b""), "what nobody reads is no failure"
    slow = asyncio.ensure_future(run(room, "sleep", "60", timeout_s=30))
    await until(lambda: bool(room._sandbox.running))
    house.clock.pass_s(31)
    with pytest.raises(TimeoutError):
        await slow
    await raises("command_not_found", run(room, "/no/such"))
    await raises("no_such_user", run(room, "true", user="nobody-at-all"))
    code, shown = await run(room, "sh", "-c", "grep CapEff /proc/self/status")
    assert (code, int(shown.split()[1], 16) != 0) == (0, True), "a build step may change owners"
    running = asyncio.ensure_future(run(room, "sleep", "60"))
    await until(lambda: bool(room._sandbox.running))
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert room._sandbox.running == {}
    await room.close()
    await room.close()
    await raises("sandbox_ended", run(room, "true"))


@pytest.mark.req("IMG-2")
async def test_trees_keep_their_owners_and_modes(house: House, tmp_path: Path) -> None:
    room = await open_room(house.node)
    place = tmp_path / "place"
    await room.make_directory(str(place / "deep"))
    (place / "there").mkdir(mode=0o700)
    (place / "old").write_text("old")
    tar = tar_of(
        ("a", None, 0o750, 1001), ("a/f", b"content", 0o4755, 1002), ("there", None, 0o711, 1003), ("old", b"new", 0o600, 0)
    )  # fmt: skip
    await room.put_tree(str(place), once(tar))

    def seen(name: str) -> tuple[int, int, int]:
        found = os.lstat(place / name)
        return stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid

    assert seen("a") == (0o750, 1001, 1002)
    assert seen("a/f") == (0o4755, 1002, 1003)
    assert seen("there") == (0o711, 1003, 1004), "a directory that was there has the archive's owner and mode now"
    assert (place / "old").read_text() == "new"
    (place / "link").symlink_to("a")
    back = b"".join([piece async for piece in room.get_tree(str(place / "link"))])
    with tarfile.open(fileobj=io.BytesIO(back)) as found:
        assert [(member.name, member.uid, member.mode) for member in found] == [("f", 1002, 0o4755)]
    assert await room.stat(str(place / "nothing")) is None
    assert (await room.stat(str(place / "link"))).kind == "dir"  # type: ignore[union-attr]
    assert (await room.stat(str(place / "a/f"))).kind == "file"  # type: ignore[union-attr]
    assert await room.read_file(str(place / "a/f"), 4) == b"cont"
    assert await room.read_file(str(place / "nothing"), 4) is None
    await raises("is_a_directory", room.put_tree(str(place), once(tar_of(("a", b"file", 0o644, 0)))))
    await room.close()


@pytest.mark.req("IMG-2")
@pytest.mark.req("ISO-3")
async def test_nobody_sees_a_room_and_the_next_daemon_ends_it(house: House) -> None:
    room = await open_room(house.node)
    assert await house.node.list(ME, include_ended=True, usage=False) == []
    await raises("not_found", house.node.start_command(ME, room._sandbox.id, StartCommand(argv=["true"]), None))
    (seen,) = await house.node.list(ADMIN, include_ended=False, usage=False)
    assert seen.owner.startswith("build:")
    assert (seen.privileges, seen.labels) == ("package-install", {"cloche.build": ME.owner})
    await room.close()
    assert house.node.context.store.sandboxes() == [], "nothing of it is kept"
    left = await open_room(house.node)
    mine = await house.create()
    end_leftovers(house.node.roster)
    await until(lambda: left._sandbox.id not in house.node.roster.live)
    assert [box.id for box in await house.node.list(ME, include_ended=False, usage=False)] == [mine.id]
