"""The SDK over real HTTP; `test_sync_sdk.py` is made from this file."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche import AsyncNode, AsyncSandbox, ClocheError, CommandFailed
from cloche.client._target import parse_url
from tests.unit.api.served import BadLine, Served, served
from tests.unit.client.hostile_trees import entry, result


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with served(tmp_path) as one:
        monkeypatch.setenv("CLOCHE_URL", one.url)
        yield one


@pytest.mark.req("UX-2")
async def test_the_first_minute(node: Served) -> None:
    async with await AsyncSandbox.create("python", ttl_s=600, name="box") as box:
        result = await box.run(["print", "hällo"])
        assert (result.stdout, result.stderr, result.exit_code, result.ended) == ("hällo", "", 0, "exited")
        assert (await box.run(["stderr", "oh"])).stderr == "oh"
        assert (await box.run(["exit", "3"])).exit_code == 3
        with pytest.raises(CommandFailed) as raised:
            await box.run(["exit", "3"], check=True)
        assert raised.value.result.exit_code == 3
        assert (await box.run("true")).command.argv == ["/bin/sh", "-c", "true"]
        assert "box" in repr(box)
        assert [one.id for one in await AsyncSandbox.list()] == [box.id]
        async with await AsyncSandbox.connect("box") as again:
            assert again.id == box.id
        assert (await box.info()).ended is None
        assert (await box.extend(900)).ends_in_s == 900
    assert box.ended is not None
    assert box.ended.reason == "killed"
    assert await AsyncSandbox.list() == []
    assert len(await AsyncSandbox.list(include_ended=True)) == 1


@pytest.mark.req("EXE-3")
async def test_a_command_is_an_object(node: Served) -> None:
    async with await AsyncSandbox.create() as box:
        job = await box.commands.start(["ticks", "4", "0.02"])
        chunks = [chunk async for chunk in job.output()]
        assert [(chunk.text, chunk.fd) for chunk in chunks] == [("0\n", 1), ("1\n", 2), ("2\n", 1), ("3\n", 2)]
        assert job.exit_code == 0
        same = await box.commands.get(job.id)
        rest = [chunk.text async for chunk in same.output(from_=chunks[1].cursor)]
        assert rest == ["2\n", "3\n"]
        assert [chunk.text async for chunk in same.output(fd=2, follow=False)] == ["1\n", "3\n"]
        assert (await same.wait()).exit_code == 0
        assert [one.id for one in await box.commands.list()] == [job.id]
        async with AsyncNode() as direct:
            assert (await direct.find_command(job.id)).id == job.id


@pytest.mark.req("EXE-4")
async def test_stdin_by_offset(node: Served) -> None:
    async with await AsyncSandbox.create() as box:
        assert (await box.run(["cat"], stdin="typed")).stdout == "typed"
        job = await box.commands.start(["cat"], stdin=True)
        assert await job.write_stdin(b"a" * 2_500_000) == 2_500_000
        assert (await job.send_stdin(2_499_990, b"a" * 10 + b"b")).offset == 2_500_001
        same = await box.commands.get(job.id)
        await same.write_stdin("c")
        await same.close_stdin()
        done = await job.result()
        assert done.stdout == "a" * 2_500_000 + "bc"
        with pytest.raises(ClocheError) as raised:
            await (await box.commands.start(["silent", "9"])).write_stdin("x")
        assert raised.value.code == "no_stdin"


async def test_signals_kill_resize_and_waiting(node: Served) -> None:
    async with await AsyncSandbox.create() as box:
        job = await box.commands.start(["silent", "30"])
        await job.signal(2)
        await job.resize(10, 20)
        with pytest.raises(ClocheError) as raised:
            await job.wait(timeout_s=0.05)
        assert raised.value.code == "time_out"
        assert (await job.kill()).ended is not None
        assert (await job.wait()).reason == "killed"
        assert node.backend.commands[job.id].signals == [2]
        assert node.backend.commands[job.id].resizes == [(10, 20)]


@pytest.mark.req("UX-6")
async def test_errors_are_ours(node: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ClocheError) as raised:
        await AsyncSandbox.connect("nobody")
    assert raised.value.code == "not_found"
    with pytest.raises(ClocheError) as raised:
        await AsyncSandbox.create(name="Not A Name")
    assert raised.value.code == "invalid_request"
    with pytest.raises(ClocheError) as raised:
        await AsyncSandbox.create("full")
    assert (raised.value.code, raised.value.retry_after_s) == ("overloaded", 7)
    with pytest.raises(ClocheError) as raised:
        await AsyncSandbox.create("crash")
    assert raised.value.code == "internal"
    assert "secret" not in str(raised.value)
    for bad in ("..", "", "."):
        with pytest.raises(ClocheError) as raised:
            await AsyncSandbox.connect(bad)
        assert raised.value.code == "invalid_request"
    monkeypatch.setenv("CLOCHE_URL", f"unix://{tmp_path}/none.sock")
    with pytest.raises(ClocheError) as raised:
        await AsyncSandbox.create()
    assert raised.value.code == "node_unavailable"


@pytest.mark.req("EXE-3")
async def test_output_goes_on_after_every_broken_connection(node: Served, tmp_path: Path, seed: int) -> None:
    with BadLine(tmp_path, node.socket, seed, 200_000, 3_000_000) as line:
        async with AsyncNode(parse_url(line.url, None)) as bad, AsyncNode(parse_url(node.url, None)) as good:
            box = await AsyncSandbox.create(node=good)
            job = await box.commands.start(["bulk", str(16 * 1024 * 1024)])
            through = await bad.find_command(job.id)
            seen, expected = hashlib.sha256(), hashlib.sha256(bytes(range(256)) * 65536)
            offset = 0
            async for chunk in through.output():
                offset += len(chunk.data)
                assert chunk.cursor.offset == offset
                seen.update(chunk.data)
            assert seen.digest() == expected.digest()
            assert line.broken >= 3


@pytest.mark.req("EXE-4")
async def test_a_run_whose_answer_is_lost_runs_once(node: Served, tmp_path: Path, seed: int) -> None:
    async with AsyncNode(parse_url(node.url, None)) as good:
        box = await AsyncSandbox.create(node=good)
        with BadLine(tmp_path, node.socket, seed, 60, 1500) as line:
            async with AsyncNode(parse_url(line.url, None)) as bad:
                patient = await good.connect(box.id)
                patient.commands = type(patient.commands)(bad.transport, box.id)
                bad.transport._has_answered = True
                for number in range(5):
                    done = await patient.run(["print", f"once {number} " + "x" * 300])
                    assert done.stdout.startswith(f"once {number}")
            assert line.broken > 0
        assert len(node.backend.commands) == 5


@pytest.mark.req("EXE-6")
async def test_files(node: Served, tmp_path: Path) -> None:
    async with await AsyncSandbox.create() as box:
        assert await box.files.write("/w/a.txt", "héy") == 4
        assert await box.files.read_text("/w/a.txt") == "héy"
        assert await box.files.read("/w/a.txt", offset=1, length=2) == "é".encode()
        await box.files.write("/w/a.txt", b"!", append=True)
        assert b"".join([part async for part in box.files.read_parts("/w/a.txt")]) == "héy!".encode()
        await box.files.write("/w/bad\udcff", b"x")
        assert {one.name for one in await box.files.list("/w")} == {"a.txt", "bad\udcff"}
        assert (await box.files.stat("/w/bad\udcff")).name == "bad\udcff"
        await box.files.move("/w/a.txt", "/w/b\udcff")
        assert await box.files.read("/w/b\udcff") == "héy!".encode()
        assert await box.files.remove("/w/b\udcff") == 1
        await box.files.mkdir("/w/d")
        assert [one.path async for one in box.files.watch("/w")] == ["/w/0", "/w/1", "/w/2"]
        with pytest.raises(ClocheError) as raised:
            await box.files.read("/none")
        assert raised.value.code == "path_not_found"


@pytest.mark.req("EXE-6")
async def test_trees(node: Served, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_text("content")
    async with await AsyncSandbox.create() as box:
        assert (await box.files.upload(source, "/tree")).files == 1
        sent = node.backend.files["tar:/tree"]
        node.backend.files["tar:/tree"] = sent[:-1024] + entry("../x", data=b"x") + result()
        report = await box.files.download("/tree", target)
        assert (target / "d" / "f").read_text() == "content"
        assert [one.code for one in report.errors] == ["invalid_path"]
        node.backend.files["tar:/tree"] = sent[:700]
        with pytest.raises(ClocheError) as raised:
            await box.files.download("/tree", target)
        assert raised.value.code == "transfer_aborted"


@pytest.mark.req("EXE-8")
async def test_ports(node: Served) -> None:
    async with await AsyncSandbox.create() as box:
        async with await box.connect_port(8000) as inside:
            await inside.send(b"hello")
            assert await inside.receive() == b"hello"
            await inside.send_eof()
            assert [await inside.receive(), await inside.receive()] == [b"bye", b""]
        with pytest.raises(ClocheError) as raised:
            await box.connect_port(1)
        assert raised.value.code == "connection_refused"


async def test_a_terminal(node: Served) -> None:
    from cloche.wire.commands import Terminal

    async with await AsyncSandbox.create() as box:
        job = await box.commands.start(["cat"], terminal=Terminal(rows=5, cols=5), stdin=True)
        async with await job.attach() as screen:
            await screen.send(b"keys")
            assert await screen.receive() == b"keys"
            await screen.resize(40, 100)
            await screen.send(b"more")
            assert await screen.receive() == b"more"
            assert str(screen.cursor) == "1.8"
        async with await job.attach(from_="1.4") as screen:
            assert await screen.receive() == b"more"
            await job.kill()
            assert await screen.receive() == b""
            assert screen.ended is not None
            assert screen.ended.reason == "killed"
        assert node.backend.commands[job.id].resizes == [(40, 100)]


async def test_it_waits_a_moment_for_a_node_that_is_being_replaced(node: Served, tmp_path: Path) -> None:
    async with AsyncNode() as known:
        await known.info()
        node.stop()
        successor = Served(tmp_path)
        later = threading.Timer(0.3, successor.start)
        later.start()
        try:
            assert (await known.info()).pid == 1
        finally:
            later.join()
            successor.stop()
