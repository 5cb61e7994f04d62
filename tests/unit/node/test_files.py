"""Files, trees, watches and ports of a guest, through the node."""

import asyncio
import io
import json
import os
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche.wire.files import MakeDirectory, Move
from cloche_server.node.journal import verify
from tests.unit.node.house import ADMIN, ME, House, make_images, once, raises
from tests.unit.node.native_engine import can_run

pytestmark = pytest.mark.skipif(not can_run(), reason="needs root, unshare and a built agent (just setup)")


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path, make_images(tmp_path))
    await made.node.start()
    yield made
    await made.node.kill_all(ADMIN)
    await made.node.stop()
    verify(tmp_path / "state" / "journal")


@pytest.fixture
async def place(house: House, tmp_path: Path) -> tuple[House, str, Path]:
    directory = tmp_path / "inside"
    directory.mkdir()
    return house, (await house.create()).id, directory


@pytest.mark.req("EXE-6")
async def test_files(place: tuple[House, str, Path]) -> None:
    house, sandbox, inside = place
    node, data = house.node, os.urandom(3_000_000)
    path = str(inside / "a" / "file")
    pieces = [data[at : at + 100_000] for at in range(0, len(data), 100_000)]
    assert await node.write_file(
        ME, sandbox, path, once(*pieces), mode=0o640, make_parents=True, append=False, user=None
    ) == len(data)
    assert (inside / "a" / "file").read_bytes() == data
    read = [piece async for piece in node.read_file(ME, sandbox, path, offset=0, length=None, user=None)]
    assert b"".join(read) == data
    part = [piece async for piece in node.read_file(ME, sandbox, path, offset=10, length=5, user=None)]
    assert b"".join(part) == data[10:15]
    entry = await node.stat(ME, sandbox, path, follow=True, user=None)
    assert (entry.type, entry.size, entry.mode & 0o777) == ("file", len(data), 0o640)
    assert await node.make_directory(ME, sandbox, MakeDirectory(path=str(inside / "b")))
    await node.move(ME, sandbox, Move(source=path, target=str(inside / "b" / "moved")))
    listed = await node.list_files(ME, sandbox, str(inside), depth=3, user=None)
    assert sorted(entry.name for entry in listed.entries) == ["a", "b", "moved"]
    await raises("not_empty", node.remove(ME, sandbox, str(inside / "b"), recursive=False, user=None))
    assert await node.remove(ME, sandbox, str(inside / "b"), recursive=True, user=None) == 2
    await raises("path_not_found", node.stat(ME, sandbox, path, follow=True, user=None))
    with pytest.raises(ClocheError) as missing:
        [piece async for piece in node.read_file(ME, sandbox, path, offset=0, length=None, user=None)]
    assert missing.value.code == "path_not_found"


@pytest.mark.req("EXE-6")
async def test_trees(place: tuple[House, str, Path]) -> None:
    house, sandbox, inside = place
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for number in range(50):
            info = tarfile.TarInfo(f"d/{number}")
            info.size = number * 100
            tar.addfile(info, io.BytesIO(bytes([number]) * info.size))
    target = str(inside / "tree")
    wrote = await house.node.write_tree(ME, sandbox, target, once(made.getvalue()), overwrite=False, user=None)
    assert (wrote.files >= 50, wrote.errors) == (True, [])
    back = b"".join([piece async for piece in house.node.read_tree(ME, sandbox, target, user=None)])
    with tarfile.open(fileobj=io.BytesIO(back)) as tar:
        members = tar.getmembers()
        assert members[-1].name == ".cloche-result.json"
        result = tar.extractfile(members[-1])
        assert result is not None
        assert json.loads(result.read())["errors"] == []
        assert sum(member.isfile() for member in members) == 51


@pytest.mark.req("EXE-6")
async def test_watch(place: tuple[House, str, Path]) -> None:
    house, sandbox, inside = place
    seen = []

    async def watching() -> None:
        async for event in house.node.watch(ME, sandbox, str(inside), recursive=True, user=None):
            seen.append((event.type, Path(event.path).name))  # noqa: PERF401 (each is looked at while it goes on)

    task = asyncio.create_task(watching())
    deadline = time.monotonic() + 10
    while ("created", "new") not in seen and time.monotonic() < deadline:
        (inside / "new").unlink(missing_ok=True)
        (inside / "new").touch()
        await asyncio.sleep(0.05)
    assert ("created", "new") in seen
    task.cancel()
    await asyncio.wait([task])
    assert (await house.run(sandbox, "true")).ended is not None


@pytest.mark.req("EXE-8")
async def test_ports(place: tuple[House, str, Path]) -> None:
    house, sandbox, _ = place

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read()).upper())
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    duplex = await house.node.connect_port(ME, sandbox, port)
    await duplex.send(b"hello")
    await duplex.send_eof()
    assert await duplex.receive() == b"HELLO"
    assert await duplex.receive() == b""
    await duplex.close()
    server.close()
    await raises("connection_refused", house.node.connect_port(ME, sandbox, port))
