"""The pump against a fake guest over a socketpair, on asyncio's loop and on uvloop."""

import asyncio
import gc
import hashlib
import os
import socket
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from cloche_server.channel import (
    Budget,
    ByteReader,
    ByteWriter,
    Channel,
    ChannelLost,
    OperationFailed,
    ProtocolError,
    Stream,
    StreamEnded,
    WrongGeneration,
    unwrap,
)
from cloche_server.channel.pump import OUT_BYTES_MAX
from tests.unit.channel.fake_guest import FakeGuest, frame, pattern, pattern_sha256
from tests.unit.channel.transcript import HELLO, Ear

MIB = 1 << 20


async def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


class World:
    def __init__(self) -> None:
        self.budget = Budget(256 * MIB)
        self.lost: list[str] = []

    @asynccontextmanager
    async def attached(
        self, guest: FakeGuest | None = None, **options: object
    ) -> AsyncIterator[tuple[Channel, socket.socket]]:
        """A channel, and the guest's end of its socket (played by `guest` if given)."""
        ours, theirs = socket.socketpair()
        if guest is None:
            theirs.sendall(frame("HELLO", 0, HELLO))
        else:
            guest.sock = theirs
            theirs.setblocking(False)
            guest.start()
        async with asyncio.timeout(5):
            channel = await Channel.fresh(ours, budget=self.budget, on_lost=self.lost.append, **options)  # type: ignore[arg-type]
        try:
            yield channel, theirs
        finally:
            channel.close("test over")
            theirs.close()
        assert self.budget.bytes_used == 0, "every window is given back"


@pytest.fixture
def world() -> World:
    return World()


def guest(**options: object) -> FakeGuest:
    placeholder, _ = socket.socketpair()
    return FakeGuest(placeholder, **options)  # type: ignore[arg-type]


async def hashed(reader: ByteReader) -> str:
    digest = hashlib.sha256()
    async for chunk in reader:
        digest.update(chunk)
    return digest.hexdigest()


async def patterned(count: int) -> AsyncIterator[bytes]:
    for at in range(0, count, 300_007):
        yield pattern(at, min(count, at + 300_007))


@pytest.mark.req("EXE-1")
async def test_hello_ping_open_read_write_call(world: World) -> None:
    async with world.attached(guest()) as (channel, _):
        assert channel.hello is not None
        assert channel.hello["gen"] == 1
        assert await channel.ping(2) < 2
        reader = ByteReader()
        stream = channel.open("source", {"bytes": 5 * MIB}, sink=reader)
        reader.attach(stream)
        assert await stream.opened() == {"pid": 42}
        assert await hashed(reader) == pattern_sha256(5 * MIB)
        assert unwrap(await stream.result) == {"bytes": 5 * MIB}
        stream.confirm()
        result, _ = await channel.call("sink", {}, data=patterned(5 * MIB))
        assert result["sha256"] == pattern_sha256(5 * MIB)
        _, content = await channel.call("source", {"bytes": 1000}, limit_bytes=1000)
        assert content == pattern(0, 1000)
        with pytest.raises(OperationFailed) as caught:
            await channel.call("fail", {})
        assert caught.value.code == "not_found"
        with pytest.raises(OperationFailed) as caught:
            await channel.call("source", {"bytes": 3000}, limit_bytes=2999)
        assert caught.value.code == "too_large"
        assert channel.stats.streams_open == 0


def test_the_same_on_uvloop(world: World) -> None:
    uvloop = pytest.importorskip("uvloop", reason="uvloop is the server's loop, but this room does not depend on it")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(test_hello_ping_open_read_write_call(world))


@pytest.mark.req("EXE-3")
async def test_a_reader_that_stops_stops_the_guest(world: World) -> None:
    async with world.attached(guest()) as (channel, _):
        reader = ByteReader()
        stream = channel.open("source", {"bytes": 64 * MIB}, sink=reader)
        reader.attach(stream)
        async for _chunk in reader:
            if stream.received > 8 * MIB:
                break
        await channel.ping(2)
        await channel.ping(2)
        stopped = stream.received
        assert stopped <= 8 * MIB + 2 * MIB, "one window at most after the last chunk taken"
        await channel.ping(2)
        assert stream.received == stopped
        stream.discard("enough")
        await stream.result
        await until(lambda: channel.stats.streams_open == 0)


@pytest.mark.req("EXE-3")
async def test_a_guest_that_grants_no_credit_stops_the_writer(world: World) -> None:
    async with world.attached(guest()) as (channel, _):
        stream = channel.open("never", {}, sink=Ear())
        writer = asyncio.create_task(ByteWriter(stream).write(bytes(10 * MIB)))
        await channel.ping(2)
        await until(lambda: stream.sent == 65_536)
        assert not writer.done()
        with pytest.raises(BufferError):
            stream.send(bytes(MIB))
        assert channel.stats.out_waiting_bytes < MIB
        stream.abort("enough")
        with pytest.raises(StreamEnded):
            await writer
        await stream.result
        stream.confirm()


@pytest.mark.req("EXE-3")
async def test_a_writer_without_a_task_is_told_when_there_is_room(world: World) -> None:
    async with world.attached(guest()) as (channel, _):
        stream = channel.open("sink", {}, sink=Ear())
        content, at = pattern(0, 3 * MIB), 0

        def push() -> None:
            nonlocal at
            while at < len(content) and (room := stream.room):
                piece = content[at : at + room]
                stream.send(piece)
                at += len(piece)
            if at < len(content):
                stream.when_room(push)
            else:
                stream.eof()

        push()
        assert 0 < at < len(content), "the first window is smaller than what there is"
        assert unwrap(await stream.result)["sha256"] == pattern_sha256(3 * MIB)
        told: list[int] = []
        stream.when_room(lambda: told.append(1))
        stream.confirm()
        assert not told, "nobody is told of room on a stream that has ended"


@pytest.mark.req("EXE-3")
async def test_a_guest_that_does_not_read_fills_no_memory(world: World) -> None:
    """It makes us answer (PONG, END) and never reads: at the bound of the outbox we stop reading too."""
    async with world.attached() as (channel, theirs):
        theirs.setblocking(False)
        flood = b"".join(frame("PING", 0, bytes(64)) for _ in range(1000))
        loop = asyncio.get_running_loop()

        async def shout() -> None:
            while True:
                await loop.sock_sendall(theirs, flood)

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(shout(), 3)
        assert channel.stats.out_waiting_bytes < OUT_BYTES_MAX + 2 * MIB


@pytest.mark.req("EXE-3")
async def test_tiny_and_empty_frames_cost_a_reader_no_more_than_its_window(world: World) -> None:
    async with world.attached(share=1.0) as (channel, theirs):
        reader = ByteReader()
        stream = channel.open("exec", {}, sink=reader)
        reader.attach(stream)
        theirs.setblocking(False)
        tracemalloc.start()
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(theirs, frame("DATA", 2) * 30_000 + frame("DATA", 2, b"ab") * 32_768)
            await until(lambda: stream.received == 65_536)
            assert tracemalloc.get_traced_memory()[0] < MIB
        finally:
            tracemalloc.stop()
        theirs.sendall(frame("EOF", 2, (65_536).to_bytes(8, "little")))
        assert b"".join([chunk async for chunk in reader]) == b"ab" * 32_768


@pytest.mark.req("EXE-3")
async def test_the_owner_can_stop_reading(world: World) -> None:
    async with world.attached(guest()) as (channel, _):
        channel.pause_reading()
        with pytest.raises(TimeoutError):
            await channel.ping(0.2)
        channel.resume_reading()
        assert await channel.ping(2) < 2


async def test_a_hundred_thousand_opens_by_the_guest(world: World) -> None:
    async with world.attached(share=1.0) as (channel, theirs):
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        opens = b"".join(frame("OPEN", stream, b'{"op":"connect"}') for stream in range(1, 200_001, 2))

        async def read_answers() -> int:
            count = 0
            while count < 100_000 * 90:
                data = await loop.sock_recv(theirs, MIB)
                count += len(data)
                if data.endswith(frame("END", 199_999, b"")[-1:]) and channel.stats.frames_out >= 100_000:
                    break
            return count

        reader = asyncio.create_task(read_answers())
        await loop.sock_sendall(theirs, opens)
        await until(lambda: channel.stats.frames_out == 100_000, 60)
        reader.cancel()
        assert channel.stats.streams_open == 0
        assert world.lost == []


async def test_the_gate_accepts_later(world: World) -> None:
    offers: asyncio.Queue[Stream] = asyncio.Queue()

    def offer(stream: Stream, op: str, fields: dict[str, object]) -> None:
        assert (op, fields["host"]) == ("connect", "example.org")
        offers.put_nowait(stream)

    async with world.attached(guest_open=offer) as (channel, theirs):
        theirs.sendall(frame("OPEN", 1, {"op": "connect", "host": "example.org"}) + frame("DATA", 1, b"GET"))
        stream = await offers.get()
        reader = ByteReader()
        stream.accept(reader, {})
        reader.attach(stream)
        theirs.sendall(frame("EOF", 1, (3).to_bytes(8, "little")))
        assert [chunk async for chunk in reader] == [b"GET"]
        await ByteWriter(stream).write(b"200")
        stream.eof()
        stream.end({"ok": {}})
        expected = frame("OPENED", 1, b"{}") + frame("DATA", 1, b"200") + frame("EOF", 1, (3).to_bytes(8, "little")) + frame("END", 1, b'{"ok":{}}')  # fmt: skip
        theirs.setblocking(False)
        got = b""
        while len(got) < len(expected):
            got += await asyncio.get_running_loop().sock_recv(theirs, 4096)
        assert got == expected
        assert channel.stats.streams_open == 0


@pytest.mark.req("ISO-7")
@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (b"\xff" + bytes(20), "protocol_error: kind"),
        (frame("DATA", 2, b"x")[:-1] + b"\0", "protocol_error: crc"),
        (frame("DATA", 9, b"x"), "protocol_error: unexpected_frame"),
        (frame("END", 2, b"[]"), "protocol_error: json"),
        (b"", "closed_by_guest"),
    ],
    ids=["kind", "crc", "stream", "json", "eof"],
)
async def test_hostile_bytes_end_the_channel_once(world: World, hostile: bytes, reason: str) -> None:
    async with world.attached() as (channel, theirs):
        ear = Ear()
        stream = channel.open("exec", {}, sink=ear)
        theirs.sendall(hostile + frame("PING", 0))
        theirs.shutdown(socket.SHUT_WR)
        await until(lambda: bool(world.lost))
        assert world.lost[0].startswith(reason)
        assert ear.heard == [f"lost {world.lost[0]}"]
        with pytest.raises(ChannelLost):
            await stream.result
        with pytest.raises(ChannelLost):
            await stream.opened()
        with pytest.raises(ChannelLost):
            channel.open("exec", {}, sink=ear)
        with pytest.raises(ChannelLost):
            await channel.ping(1)
    assert len(world.lost) == 1


async def test_a_sink_that_fails_ends_its_own_channel_only(world: World) -> None:
    class Broken(Ear):
        def data(self, view: memoryview) -> None:
            raise RuntimeError("disk full")

    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with world.attached(guest()) as (channel, _), world.attached(guest()) as (other, _):
        channel.open("source", {"bytes": 10}, sink=Broken())
        await until(lambda: world.lost == ["internal_error"])
        assert await other.ping(2) < 2
    assert len(reported) == 1


async def test_no_hello_in_time_or_a_wrong_one(world: World) -> None:
    for said, error in (
        (b"", TimeoutError),
        (frame("PING", 0), ProtocolError),
        (frame("HELLO", 0, {"gen": 2}), WrongGeneration),
    ):
        ours, theirs = socket.socketpair()
        theirs.sendall(said)
        with pytest.raises(error):
            async with asyncio.timeout(0.2):
                await Channel.fresh(ours, budget=world.budget, on_lost=world.lost.append)
        assert ours.fileno() == -1
        theirs.close()
    assert world.lost == [], "who awaits `fresh` gets the error; nobody is told twice"


@pytest.mark.req("ISO-7")
async def test_descriptors_that_a_guest_attaches_are_not_taken(world: World) -> None:
    async with world.attached() as (channel, theirs):
        before = len(os.listdir("/proc/self/fd"))
        spare = os.open("/dev/null", os.O_RDONLY)
        socket.send_fds(theirs, [frame("PING", 0)], [spare] * 20)
        os.close(spare)
        await until(lambda: channel.stats.frames_in == 2)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.req("EXE-3")
async def test_a_noisy_guest_is_paced_and_its_neighbour_is_heard(world: World) -> None:
    async with world.attached() as (noisy, theirs), world.attached(guest()) as (quiet, _):
        theirs.setblocking(False)
        flood = frame("PONG", 0) * 20_000
        loop = asyncio.get_running_loop()

        async def shout() -> None:
            while True:
                await loop.sock_sendall(theirs, flood)

        shouting = asyncio.create_task(shout())
        await until(lambda: noisy.stats.pauses > 5)
        slowest = max([await quiet.ping(5) for _ in range(200)])
        shouting.cancel()
        assert slowest < 0.5
        assert noisy.stats.paused_s > 0
        assert quiet.stats.pauses == 0


@pytest.mark.req("EXE-3")
async def test_an_idle_channel_is_small(world: World) -> None:
    async with world.attached():  # the shared buffer, once
        pass
    gc.collect()
    tracemalloc.start()
    try:
        pairs, channels = [], []
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(50):
            ours, theirs = socket.socketpair()
            theirs.sendall(frame("HELLO", 0, HELLO) + frame("PING", 0) * 1000 + frame("PONG", 0, bytes(60))[:50])
            channels.append(await Channel.fresh(ours, budget=world.budget, on_lost=world.lost.append))
            pairs.append(theirs)
        await until(lambda: all(channel.stats.frames_in == 1001 for channel in channels))
        gc.collect()
        each = (tracemalloc.get_traced_memory()[0] - before) / len(channels)
    finally:
        tracemalloc.stop()
    for channel, theirs in zip(channels, pairs, strict=True):
        channel.close("over")
        theirs.close()
    assert each < 64 * 1024, f"{each:.0f} bytes for an idle channel"
