# Made by tools/unasync.py from tests/unit/client/test_async_sdk.py: edit that one.
"""The SDK over real HTTP; `test_sync_sdk.py` is made from this file."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche import ClocheError, CommandFailed, Node, Sandbox
from cloche.client._target import parse_url
from tests.unit.api.served import BadLine, Served, served
from tests.unit.client.hostile_trees import entry, result


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with served(tmp_path) as one:
        monkeypatch.setenv("CLOCHE_URL", one.url)
        yield one


@pytest.mark.req("UX-2")
def test_the_first_minute(node: Served) -> None:
    with Sandbox.create("python", ttl_s=600, name="box") as box:
        result = box.run(["print", "hällo"])
        assert (result.stdout, result.stderr, result.exit_code, result.ended) == ("hällo", "", 0, "exited")
        assert (box.run(["stderr", "oh"])).stderr == "oh"
        assert (box.run(["exit", "3"])).exit_code == 3
        with pytest.raises(CommandFailed) as raised:
            box.run(["exit", "3"], check=True)
        assert raised.value.result.exit_code == 3
        assert (box.run("true")).command.argv == ["/bin/sh", "-c", "true"]
        assert "box" in repr(box)
        assert [one.id for one in Sandbox.list()] == [box.id]
        with Sandbox.connect("box") as again:
            assert again.id == box.id
        assert (box.info()).ended is None
        assert (box.extend(900)).ends_in_s == 900
    assert box.ended is not None
    assert box.ended.reason == "killed"
    assert Sandbox.list() == []
    assert len(Sandbox.list(include_ended=True)) == 1


@pytest.mark.req("EXE-3")
def test_a_command_is_an_object(node: Served) -> None:
    with Sandbox.create() as box:
        job = box.commands.start(["ticks", "4", "0.02"])
        chunks = list(job.output())
        assert [(chunk.text, chunk.fd) for chunk in chunks] == [("0\n", 1), ("1\n", 2), ("2\n", 1), ("3\n", 2)]
        assert job.exit_code == 0
        same = box.commands.get(job.id)
        rest = [chunk.text for chunk in same.output(from_=chunks[1].cursor)]
        assert rest == ["2\n", "3\n"]
        assert [chunk.text for chunk in same.output(fd=2, follow=False)] == ["1\n", "3\n"]
        assert (same.wait()).exit_code == 0
        assert [one.id for one in box.commands.list()] == [job.id]
        with Node() as direct:
            assert (direct.find_command(job.id)).id == job.id


@pytest.mark.req("EXE-4")
def test_stdin_by_offset(node: Served) -> None:
    with Sandbox.create() as box:
        assert (box.run(["cat"], stdin="typed")).stdout == "typed"
        job = box.commands.start(["cat"], stdin=True)
        assert job.write_stdin(b"a" * 2_500_000) == 2_500_000
        assert (job.send_stdin(2_499_990, b"a" * 10 + b"b")).offset == 2_500_001
        same = box.commands.get(job.id)
        same.write_stdin("c")
        same.close_stdin()
        done = job.result()
        assert done.stdout == "a" * 2_500_000 + "bc"
        with pytest.raises(ClocheError) as raised:
            (box.commands.start(["silent", "9"])).write_stdin("x")
        assert raised.value.code == "no_stdin"


def test_signals_kill_resize_and_waiting(node: Served) -> None:
    with Sandbox.create() as box:
        job = box.commands.start(["silent", "30"])
        job.signal(2)
        job.resize(10, 20)
        with pytest.raises(ClocheError) as raised:
            job.wait(timeout_s=0.05)
        assert raised.value.code == "time_out"
        assert (job.kill()).ended is not None
        assert (job.wait()).reason == "killed"
        assert node.backend.commands[job.id].signals == [2]
        assert node.backend.commands[job.id].resizes == [(10, 20)]


@pytest.mark.req("UX-6")
def test_errors_are_ours(node: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ClocheError) as raised:
        Sandbox.connect("nobody")
    assert raised.value.code == "not_found"
    with pytest.raises(ClocheError) as raised:
        Sandbox.create(name="Not A Name")
    assert raised.value.code == "invalid_request"
    with pytest.raises(ClocheError) as raised:
        Sandbox.create("full")
    assert (raised.value.code, raised.value.retry_after_s) == ("overloaded", 7)
    with pytest.raises(ClocheError) as raised:
        Sandbox.create("crash")
    assert raised.value.code == "internal"
    assert "secret" not in str(raised.value)
    for bad in ("..", "", "."):
        with pytest.raises(ClocheError) as raised:
            Sandbox.connect(bad)
        assert raised.value.code == "invalid_request"
    monkeypatch.setenv("CLOCHE_URL", f"unix://{tmp_path}/none.sock")
    with pytest.raises(ClocheError) as raised:
        Sandbox.create()
    assert raised.value.code == "node_unavailable"


@pytest.mark.req("EXE-3")
def test_output_goes_on_after_every_broken_connection(node: Served, tmp_path: Path, seed: int) -> None:
    with BadLine(tmp_path, node.socket, seed, 200_000, 3_000_000) as line:
        with Node(parse_url(line.url, None)) as bad, Node(parse_url(node.url, None)) as good:
            box = Sandbox.create(node=good)
            job = box.commands.start(["bulk", str(16 * 1024 * 1024)])
            through = bad.find_command(job.id)
            seen, expected = hashlib.sha256(), hashlib.sha256(bytes(range(256)) * 65536)
            offset = 0
            for chunk in through.output():
                offset += len(chunk.data)
                assert chunk.cursor.offset == offset
                seen.update(chunk.data)
            assert seen.digest() == expected.digest()
            assert line.broken >= 3


@pytest.mark.req("EXE-4")
def test_a_run_whose_answer_is_lost_runs_once(node: Served, tmp_path: Path, seed: int) -> None:
    with Node(parse_url(node.url, None)) as good:
        box = Sandbox.create(node=good)
        with BadLine(tmp_path, node.socket, seed, 60, 1500) as line:
            with Node(parse_url(line.url, None)) as bad:
                patient = good.connect(box.id)
                patient.commands = type(patient.commands)(bad.transport, box.id)
                bad.transport._has_answered = True
                for number in range(5):
                    done = patient.run(["print", f"once {number} " + "x" * 300])
                    assert done.stdout.startswith(f"once {number}")
            assert line.broken > 0
        assert len(node.backend.commands) == 5


@pytest.mark.req("EXE-6")
def test_files(node: Served, tmp_path: Path) -> None:
    with Sandbox.create() as box:
        assert box.files.write("/w/a.txt", "héy") == 4
        assert box.files.read_text("/w/a.txt") == "héy"
        assert box.files.read("/w/a.txt", offset=1, length=2) == "é".encode()
        box.files.write("/w/a.txt", b"!", append=True)
        assert b"".join(list(box.files.read_parts("/w/a.txt"))) == "héy!".encode()
        box.files.write("/w/bad\udcff", b"x")
        assert {one.name for one in box.files.list("/w")} == {"a.txt", "bad\udcff"}
        assert (box.files.stat("/w/bad\udcff")).name == "bad\udcff"
        box.files.move("/w/a.txt", "/w/b\udcff")
        assert box.files.read("/w/b\udcff") == "héy!".encode()
        assert box.files.remove("/w/b\udcff") == 1
        box.files.mkdir("/w/d")
        assert [one.path for one in box.files.watch("/w")] == ["/w/0", "/w/1", "/w/2"]
        with pytest.raises(ClocheError) as raised:
            box.files.read("/none")
        assert raised.value.code == "path_not_found"


@pytest.mark.req("EXE-6")
def test_trees(node: Served, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_text("content")
    with Sandbox.create() as box:
        assert (box.files.upload(source, "/tree")).files == 1
        sent = node.backend.files["tar:/tree"]
        node.backend.files["tar:/tree"] = sent[:-1024] + entry("../x", data=b"x") + result()
        report = box.files.download("/tree", target)
        assert (target / "d" / "f").read_text() == "content"
        assert [one.code for one in report.errors] == ["invalid_path"]
        node.backend.files["tar:/tree"] = sent[:700]
        with pytest.raises(ClocheError) as raised:
            box.files.download("/tree", target)
        assert raised.value.code == "transfer_aborted"


@pytest.mark.req("EXE-8")
def test_ports(node: Served) -> None:
    with Sandbox.create() as box:
        with box.connect_port(8000) as inside:
            inside.send(b"hello")
            assert inside.receive() == b"hello"
            inside.send_eof()
            assert [inside.receive(), inside.receive()] == [b"bye", b""]
        with pytest.raises(ClocheError) as raised:
            box.connect_port(1)
        assert raised.value.code == "connection_refused"


def test_a_terminal(node: Served) -> None:
    from cloche.wire.commands import Terminal

    with Sandbox.create() as box:
        job = box.commands.start(["cat"], terminal=Terminal(rows=5, cols=5), stdin=True)
        with job.attach() as screen:
            screen.send(b"keys")
            assert screen.receive() == b"keys"
            screen.resize(40, 100)
            screen.send(b"more")
            assert screen.receive() == b"more"
            assert str(screen.cursor) == "1.8"
        with job.attach(from_="1.4") as screen:
            assert screen.receive() == b"more"
            job.kill()
            assert screen.receive() == b""
            assert screen.ended is not None
            assert screen.ended.reason == "killed"
        assert node.backend.commands[job.id].resizes == [(40, 100)]


def test_it_waits_a_moment_for_a_node_that_is_being_replaced(node: Served, tmp_path: Path) -> None:
    with Node() as known:
        known.info()
        node.stop()
        successor = Served(tmp_path)
        later = threading.Timer(0.3, successor.start)
        later.start()
        try:
            assert (known.info()).pid == 1
        finally:
            later.join()
            successor.stop()
