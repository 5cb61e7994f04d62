"""The channel against the real agent, run as an ordinary process of this machine (no sandbox, no mounts)."""

import asyncio
import hashlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cloche_server.channel import Budget, ByteReader, ByteWriter, Channel, OperationFailed, Stream, StreamState, unwrap

AGENT = Path(__file__).parents[2] / "packages/cloche-engine/src/cloche_engine/bin/cloche-guest-x86_64"
MIB = 1 << 20

pytestmark = [
    pytest.mark.req("EXE-1"),
    pytest.mark.skipif(not AGENT.exists(), reason="the guest agent is not built (just setup)"),
    pytest.mark.skipif(
        os.geteuid() != 0, reason="as PID 1 the agent changes user for each command; so needs root here"
    ),
]


class Log:
    """Consumes at once, like a command log."""

    def __init__(self, content: bytearray | None = None) -> None:
        self.content = bytearray() if content is None else content
        self.stream: Stream | None = None
        self.events: list[str] = []

    def opened(self, info: dict[str, object]) -> None:
        self.events.append("opened")

    def data(self, view: memoryview) -> None:
        self.content += view
        assert self.stream is not None
        self.stream.consumed(len(self.content))

    def eof(self, offset: int) -> None:
        assert offset == len(self.content)
        self.events.append("eof")

    def end(self, result: dict[str, object]) -> None:
        self.events.append("end")

    def credit(self, consumed: int, limit: int) -> None: ...

    def lost(self, reason: str) -> None:
        self.events.append(f"lost {reason}")


class Sandbox:
    """The agent and our end of its channel, which a channel gets a copy of, as the keeper would give it."""

    def __init__(self) -> None:
        self.kept, theirs = socket.socketpair()
        self.process = subprocess.Popen([AGENT, "--no-mounts"], stdin=theirs.fileno(), start_new_session=True)
        theirs.close()
        self.budget = Budget(256 * MIB)
        self.lost: list[str] = []

    async def fresh(self) -> Channel:
        async with asyncio.timeout(5):
            return await Channel.fresh(self.kept.dup(), budget=self.budget, on_lost=self.lost.append)

    def end(self) -> None:
        self.kept.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox()
    yield sandbox
    sandbox.end()


@pytest.fixture
async def channel(sandbox: Sandbox) -> AsyncIterator[Channel]:
    channel = await sandbox.fresh()
    yield channel
    channel.close("test over")
    assert sandbox.lost == []
    assert sandbox.budget.bytes_used == 0


def start(channel: Channel, argv: list[str], *, stdin: bool = False, command: str | None = None) -> tuple[Log, Log]:
    fields = {
        "command": command or os.urandom(8).hex(), "argv": argv, "env": {"PATH": "/usr/bin:/bin"}, "cwd": "/", "user": "0",
        "stdin": stdin, "pty": None, "privileges": "none",
    }  # fmt: skip
    out, err = Log(), Log()
    out.stream = channel.open("exec", fields, sink=out, extra_streams=1, extra_sinks=[err])
    err.stream = out.stream.extra[0]
    return out, err


async def finished(log: Log) -> dict[str, object]:
    assert log.stream is not None
    async with asyncio.timeout(20):
        result = unwrap(await log.stream.result)
    log.stream.confirm()
    return result


async def test_hello_ping_and_echo(channel: Channel) -> None:
    assert channel.hello is not None
    assert "exec" in channel.hello["ops"]  # type: ignore[operator]
    assert await channel.ping(2) < 2
    out, err = start(channel, ["/bin/sh", "-c", "echo out; echo err >&2; exit 3"])
    result = await finished(out)
    assert (result["code"], result["stdout_bytes"], result["stderr_bytes"]) == (3, 4, 4)
    assert (bytes(out.content), bytes(err.content)) == (b"out\n", b"err\n")
    assert out.events == ["opened", "eof", "end"]
    assert channel.stats.streams_open == 0


async def test_a_command_that_is_not_there(channel: Channel) -> None:
    out, _ = start(channel, ["/no/such/program"])
    with pytest.raises(OperationFailed):
        await finished(out)


@pytest.mark.req("EXE-3")
async def test_stdin_through_cat(channel: Channel) -> None:
    out, _ = start(channel, ["/bin/cat"], stdin=True)
    assert out.stream is not None
    content = os.urandom(MIB) * 8
    writer = ByteWriter(out.stream)
    await writer.write(content)
    writer.close()
    assert (await finished(out))["code"] == 0
    assert hashlib.sha256(out.content).digest() == hashlib.sha256(content).digest()
    assert out.stream.confirmed <= out.stream.sent == len(content)


@pytest.mark.req("EXE-3")
async def test_backpressure_reaches_the_process(channel: Channel) -> None:
    reader, err = ByteReader(), Log()
    fields = {"command": "yes", "argv": ["/usr/bin/yes"], "env": {}, "cwd": "/", "user": "0", "stdin": False, "pty": None, "privileges": "none"}  # fmt: skip
    stream = channel.open("exec", fields, sink=reader, extra_streams=1, extra_sinks=[err])
    err.stream = stream.extra[0]
    reader.attach(stream)
    await stream.opened()
    seen = -1
    while stream.received != seen:  # until nothing more comes: nobody reads, so one window at most
        seen = stream.received
        await channel.ping(2)
        await asyncio.sleep(0.05)
    assert 0 < stream.received <= 65_536
    stream.discard("enough")  # END comes after the last byte, so a bare abort would still need someone who reads
    async with asyncio.timeout(10):
        assert unwrap(await stream.result)["signal"] == signal.SIGKILL
    assert channel.stats.streams_open == 0


async def test_tell_and_abort(channel: Channel) -> None:
    out, _ = start(channel, ["/bin/sleep", "100"])
    assert out.stream is not None
    await out.stream.opened()
    out.stream.tell({"signal": int(signal.SIGTERM), "group": True})
    assert (await finished(out))["signal"] == signal.SIGTERM


async def test_short_calls(channel: Channel, tmp_path: Path) -> None:
    async def content() -> AsyncIterator[bytes]:
        yield b"hello "
        yield b"file"

    target = str(tmp_path / "a")
    result, _ = await channel.call("file.write", {"path": target, "user": "root"}, data=content())
    assert result["bytes"] == 10
    result, read = await channel.call("file.read", {"path": target, "user": "root"})
    assert (result["bytes"], read) == (10, b"hello file")
    with pytest.raises(OperationFailed) as caught:
        await channel.call("fs.stat", {"path": str(tmp_path / "b"), "follow": True, "user": "root"})
    assert caught.value.code == "not_found"


@pytest.mark.req("LIF-6")
@pytest.mark.parametrize("torn_bytes", [0, 5, 70_000])
async def test_reset_in_the_middle_of_a_stream(sandbox: Sandbox, torn_bytes: int) -> None:
    """Two daemons die in turn; the third has every byte of output once, and all of stdin arrived."""
    first = await sandbox.fresh()
    program = "import sys,hashlib;d=b'%d'*1;h=hashlib.sha256();[(h.update(b'%08d\\n'%i),sys.stdout.buffer.write(b'%08d\\n'%i)) for i in range(2_000_000)];sys.stdout.flush();print(h.hexdigest(),file=sys.stderr)"
    out, err = start(first, ["/usr/bin/env", "python3", "-c", program], command="c1")
    cat, _ = start(first, ["/bin/cat"], stdin=True, command="c2")
    assert out.stream is not None
    assert cat.stream is not None
    ids = (out.stream.id, out.stream.id + 2, cat.stream.id, cat.stream.id + 2)
    cat.stream.send(b"before;")
    channel, logs = first, dict(zip(ids, (out, err, cat, Log()), strict=True))
    for mark in (2 * MIB, 6 * MIB):
        async with asyncio.timeout(20):
            while len(logs[ids[0]].content) < mark:
                await asyncio.sleep(0.001)
        channel.close("killed")
        torn = b"\x04\x06\0\0\0\0\0\2\0" + os.urandom(70_000)  # the header of a 128 KiB frame, and part of it
        sandbox.kept.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(sandbox.kept, torn[:torn_bytes])

        def logged(states: dict[int, StreamState], logs: dict[int, Log] = logs) -> dict[int, int]:
            assert set(states) == set(ids)
            return {each: len(log.content) for each, log in logs.items()}

        channel, states = await Channel.reattach(
            sandbox.kept.dup(), logged=logged, budget=sandbox.budget, on_lost=sandbox.lost.append
        )
        logs = {each: Log(log.content) for each, log in logs.items()}
        for each, log in logs.items():
            log.stream = channel.adopt(each, states[each], sink=log)
    stdin = logs[ids[2]].stream
    assert stdin is not None
    assert stdin.sent == len(b"before;")
    await ByteWriter(stdin).write(b"after")
    stdin.eof()
    assert (await finished(logs[ids[0]]))["code"] == 0
    assert (await finished(logs[ids[2]]))["code"] == 0
    content = logs[ids[0]].content
    assert len(content) == 9 * 2_000_000
    assert hashlib.sha256(content).hexdigest() == logs[ids[1]].content.decode().strip()
    assert bytes(logs[ids[2]].content) == b"before;after"
    assert channel.stats.streams_open == 0
    channel.close("over")
    assert sandbox.lost == []
