"""Tunnels under load, and ends that are rude: bytes are whole, memory is bounded, nothing is left open."""

import asyncio
import gc
import hashlib
import socket
import tracemalloc
from pathlib import Path

import pytest
import uvloop

from cloche.wire.egress import EgressLimits
from cloche_server.egress import relay
from tests.unit.channel.fake_guest import pattern, pattern_sha256
from tests.unit.egress.test_tunnels import HERE, HOST, tcp
from tests.unit.egress.world import MIB, echo, opened, serving

BULK = 24 * MIB


async def source(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for at in range(0, BULK, MIB):
        writer.write(pattern(at, at + MIB))
        await writer.drain()


class Sink:
    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.count = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(MIB):
            self.digest.update(data)
            self.count += len(data)
        writer.write(b"got it")


def tunnel(world, port: int):
    return world.guest.open("connect", name=HOST, port=port)


async def test_bytes_come_down_whole(tmp_path: Path) -> None:
    async with serving(source) as server:
        async with opened(tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE) as world:
            stream = tunnel(world, server.port)
            await world.guest.until(lambda: stream.eof_received, 30)
            assert hashlib.sha256(stream.inbox).hexdigest() == pattern_sha256(BULK)
            stream.eof()
            await stream.end()
            closed = world.records("closed")[0]
    assert (closed.code, closed.bytes_down, closed.bytes_up) == ("closed", BULK, 0)


async def test_bytes_go_up_whole_and_half_close_is_kept(tmp_path: Path) -> None:
    sink = Sink()
    async with serving(sink) as server:
        async with opened(tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE) as world:
            stream = tunnel(world, server.port)
            async with asyncio.timeout(30):
                await stream.send_all(pattern(0, BULK))
            stream.eof()
            assert await stream.rest() == b"got it", "the server could answer after the client's end"
            assert await stream.end() == {"ok": {}}
    assert sink.digest.hexdigest() == pattern_sha256(BULK)


async def test_a_server_that_does_not_read_stops_the_guest_and_nothing_grows(tmp_path: Path) -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()
        await hang

    hang = asyncio.get_running_loop().create_future()
    async with serving(deaf) as server:
        async with opened(tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE) as world:
            stream = tunnel(world, server.port)
            sending = asyncio.create_task(stream.send_all(bytes(64 * MIB)))
            before = -1
            while world.channel.stats.bytes_in != before:  # until nothing moves for a while
                before = world.channel.stats.bytes_in
                await asyncio.sleep(0.3)
            assert before < 20 * MIB
            assert not sending.done()
            connection = next(iter(world.gate.connections))
            assert len(connection.relay._pending or b"") <= MIB
            sending.cancel()
            stream.abort()
            await world.until(lambda: not world.gate.connections)
        hang.set_result(None)


async def test_a_guest_that_does_not_read_stops_the_server_and_nothing_grows(tmp_path: Path) -> None:
    async with serving(source) as server:
        async with opened(tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE) as world:
            streams = []
            for _ in range(8):
                stream = tunnel(world, server.port)
                stream.grants = False
                streams.append(stream)
            await world.until(lambda: all(len(each.inbox) == 65_536 for each in streams))
            await asyncio.sleep(0.2)
            assert all(len(each.inbox) == 65_536 for each in streams)
            assert world.channel.stats.out_waiting_bytes == 0
            for stream in streams:
                stream.grants = True
                stream.grant()
            await world.guest.until(lambda: all(each.eof_received for each in streams), 60)
            assert all(len(each.inbox) == BULK for each in streams)


@pytest.mark.req("NET-9")
async def test_a_lost_channel_closes_everything_in_every_state(tmp_path: Path) -> None:
    got_end = 0

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got_end
        try:
            await reader.read(MIB)
            await reader.read(MIB)
        finally:
            got_end += 1

    async with serving(watch) as server:
        async with opened(tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE) as world:
            flowing = [tunnel(world, server.port) for _ in range(3)]
            for stream in flowing:
                stream.send(b"x")
            await world.until(lambda: len(world.gate.connections) == 3)
            world.proxy(b"CONNECT api.exam")
            world.proxy()
            await world.until(lambda: world.gate.open_count["talks"] == 5)
            world.channel.close("lost")
            await world.until(lambda: world.gate.open_count == {"talks": 0, "connections": 0, "slots": 0})
            await world.until(lambda: got_end == 3)
            assert world.codes("closed") == ["guest_gone"] * 3


async def test_a_reset_from_the_server_is_a_reset_inside(tmp_path: Path) -> None:
    """Also when it comes with last words: those are not lost, and nobody waits for ever."""

    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"last words")
        await writer.drain()
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    async with serving(rude) as server:
        async with opened(tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE) as world:
            for _ in range(20):
                stream = tunnel(world, server.port)
                stream.send(b"xx")
                result = await stream.end()
                assert result["error"]["code"] == "upstream_reset"
            assert set(world.codes("closed")) == {"upstream_reset"}


async def test_last_words_and_a_reset_in_one_event(tmp_path: Path) -> None:
    """libuv tells of both only once, and forgets the socket then: whoever reads once and waits would wait for ever."""

    async def ruder(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        writer.write(b"last words")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    async with serving(ruder) as server:
        async with opened(tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE) as world:
            for _ in range(20):
                stream = tunnel(world, server.port)
                assert "error" in await stream.end()
            assert set(world.codes("closed")) == {"upstream_reset"}


async def test_an_abort_inside_is_a_reset_for_the_server(tmp_path: Path) -> None:
    ends: list[type] = []

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(10):
                pass
            ends.append(EOFError)
        except ConnectionResetError:
            ends.append(ConnectionResetError)

    async with serving(watch) as server:
        async with opened(tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE) as world:
            stream = tunnel(world, server.port)
            stream.send(b"half a file")
            await world.until(lambda: world.gate.connections and server.accepted)
            stream.abort()
            await world.until(lambda: bool(ends))
    assert ends == [ConnectionResetError], "half a file does not look like a whole one"


async def test_idle_and_half_closed_tunnels_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def until_eof(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        await asyncio.sleep(30)

    async with serving(until_eof) as server:
        async with opened(tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE) as world:
            idle, half = tunnel(world, server.port), tunnel(world, server.port)
            half.eof()
            await world.until(lambda: len(world.gate.connections) == 2)
            monkeypatch.setattr(relay, "HALF_CLOSED_S", -1.0)
            world.gate._sweep()
            assert (await half.end())["error"]["code"] == "idle"
            assert idle.result is None
            monkeypatch.setattr(relay, "IDLE_S", -1.0)
            world.gate._sweep()
            assert (await idle.end())["error"]["code"] == "idle"


@pytest.mark.req("NET-8")
@pytest.mark.parametrize("way", ["down", "up", "both"])
async def test_the_byte_rate_holds_within_ten_percent(tmp_path: Path, way: str) -> None:
    rate = 2 * MIB
    sink = Sink()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (source if way == "down" else echo if way == "both" else sink)(reader, writer)

    async with serving(talk) as server:
        limits = EgressLimits(bytes_per_s=rate)
        async with opened(
            tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE, limits=limits
        ) as world:
            streams = [tunnel(world, server.port) for _ in range(3)]
            sending = []
            if way != "down":
                sending = [asyncio.create_task(each.send_all(bytes(BULK))) for each in streams]
            await asyncio.sleep(1.5)  # what the windows hold at first is over
            start, loop = world.gate.limits.bytes.used, asyncio.get_running_loop()
            began = loop.time()
            await asyncio.sleep(2.5)
            seen = (world.gate.limits.bytes.used - start) / (loop.time() - began)
            for task in sending:
                task.cancel()
    assert 0.9 * rate <= seen <= 1.1 * rate


@pytest.mark.req("NET-8")
async def test_the_bytes_in_all_are_an_end(tmp_path: Path) -> None:
    async with serving(source) as server:
        limits = EgressLimits(bytes_total=3 * MIB)
        async with opened(
            tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE, limits=limits
        ) as world:
            stream = tunnel(world, server.port)
            assert (await stream.end())["error"]["code"] == "bytes_used_up"
            assert 3 * MIB <= world.gate.limits.bytes.used <= 3 * MIB + 300_000
            refused = await world.connect_proxy(HOST, server.port).rest()
            assert b"X-Cloche-Denied: bytes_used_up" in refused
            assert world.codes("closed") == ["bytes_used_up"]
        async with opened(  # a new daemon's gate of the same sandbox
            tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE, limits=limits
        ) as world:
            assert b"X-Cloche-Denied: bytes_used_up" in await world.connect_proxy(HOST, server.port).rest()


@pytest.mark.req("NET-8")
async def test_what_came_early_is_limited_too(tmp_path: Path) -> None:
    """The conversation has read it and given credit for it: paying for it later takes no credit back."""
    sink = Sink()
    async with serving(sink) as server:
        limits = EgressLimits(bytes_per_s=20_000)
        async with opened(
            tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE, limits=limits
        ) as world:
            head = f"CONNECT {HOST}:{server.port} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
            stream = world.proxy(head + bytes(30_000))
            await stream.read(b" 200 ")
            stream.send(bytes(3_000))
            stream.eof()
            assert (await stream.rest()).endswith(b"got it")
            assert world.channel.lost_reason is None
    assert sink.count == 33_000


async def test_an_idle_tunnel_is_small(tmp_path: Path) -> None:
    async with serving(echo) as server:
        async with opened(
            tmp_path,
            [tcp(HOST, server.port)],
            ports=[server.port],
            organisation=HERE,
            limits=EgressLimits(connections=200, attempts_per_s=1000),
        ) as world:
            warm = tunnel(world, server.port)
            warm.send(b"x")
            await warm.read(b"x")
            gc.collect()
            tracemalloc.start(1)
            before = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*cloche_server*")])
            streams = [tunnel(world, server.port) for _ in range(100)]
            for stream in streams:
                stream.send(b"x" * 1000)
                await stream.read(b"x" * 1000)
            gc.collect()
            after = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*cloche_server*")])
            tracemalloc.stop()
            grown = sum(each.size_diff for each in after.compare_to(before, "filename"))
    assert grown / 100 < 20_000, f"{grown / 100:.0f} bytes a tunnel"


UVLOOP = [
    test_bytes_come_down_whole,
    test_bytes_go_up_whole_and_half_close_is_kept,
    test_a_reset_from_the_server_is_a_reset_inside,
    test_last_words_and_a_reset_in_one_event,
    test_an_abort_inside_is_a_reset_for_the_server,
    test_a_lost_channel_closes_everything_in_every_state,
]


@pytest.mark.parametrize("test", UVLOOP, ids=lambda test: test.__name__[5:])
def test_the_same_on_uvloop(tmp_path: Path, test) -> None:
    """The server's loop: it forgets a socket that has an error, and has its own order of events."""
    uvloop.run(test(tmp_path))
