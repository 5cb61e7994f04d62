"""A daemon dies in the middle of frames, in both directions, and its successor goes on: every byte once, in order."""

import asyncio
import hashlib
import json
import random
import socket
import time

import pytest

from cloche_server.channel import Budget, Channel, ProtocolError, Stream, StreamState
from tests.unit.channel.fake_guest import FakeGuest, frame, pattern, pattern_sha256
from tests.unit.channel.transcript import Ear

MIB = 1 << 20


class Log(Ear):
    """A sink like the node's: what it wrote outlives the daemon."""

    def __init__(self, content: bytearray) -> None:
        super().__init__()
        self.content = content
        self.stream: Stream | None = None

    def data(self, view: memoryview) -> None:
        self.content += view
        assert self.stream is not None
        self.stream.consumed(len(self.content))


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
    return ours, theirs


@pytest.mark.req("LIF-6")
@pytest.mark.req("EXE-1")
@pytest.mark.parametrize("seed", range(6))
async def test_successors_go_on_in_the_middle_of_frames(seed: int) -> None:
    chance = random.Random(seed)
    keeper, theirs = pair()
    guest = FakeGuest(theirs, frame_bytes=100_000)
    guest.start()
    budget, total = Budget(64 * MIB), 30 * MIB
    content, stdin_at = bytearray(), 0
    channel = await Channel.fresh(keeper.dup(), budget=budget, on_lost=print)
    log = Log(content)
    out = log.stream = channel.open("source", {"bytes": total}, sink=log)
    stdin = channel.open("sink", {}, sink=Ear())
    for _ in range(5):
        stop = len(content) + chance.randrange(1, 3 * MIB)
        while len(content) < stop and not out.result.done():
            await stdin.writable()
            piece = pattern(stdin_at, stdin_at + chance.randrange(1, 200_000))
            stdin.send(piece)
            stdin_at += len(piece)
            await asyncio.sleep(0)
        channel.pause_reading()
        # The daemon dies: half a frame of its own may be in the pipe, and the guest is in the middle of one too.
        channel.close("killed")
        torn = frame("DATA", stdin.id, chance.randbytes(131_072))[: chance.randrange(0, 131_000)]
        await asyncio.get_running_loop().sock_sendall(keeper, torn)
        assert budget.bytes_used == 0
        channel, states = await Channel.reattach(
            keeper.dup(), logged=lambda _: {2: len(content), 4: 0}, budget=budget, on_lost=print
        )
        log = Log(content)
        out = log.stream = channel.adopt(2, states[2], sink=log)
        stdin = channel.adopt(4, states[4], sink=Ear())
        stdin_at = states[4].received
        assert stdin.sent == stdin_at
    await asyncio.wait_for(out.result, 30)
    assert len(content) == total
    assert hashlib.sha256(content).hexdigest() == pattern_sha256(total)
    await stdin.writable()
    stdin.eof()
    result = await asyncio.wait_for(stdin.result, 10)
    assert result == {"ok": {"bytes": stdin_at, "sha256": pattern_sha256(stdin_at)}}
    assert guest.resets == 5
    out.confirm()
    stdin.confirm()
    assert channel.next_stream_id() == 6
    channel.close("over")
    keeper.close()


@pytest.mark.req("LIF-6")
async def test_an_ended_stream_ends_again_and_others_are_closed() -> None:
    keeper, theirs = pair()
    guest = FakeGuest(theirs)
    guest.start()
    budget = Budget(64 * MIB)
    channel = await Channel.fresh(keeper.dup(), budget=budget, on_lost=print)
    log = Log(bytearray())
    log.stream = channel.open("source", {"bytes": 1000}, sink=log)
    channel.open("never", {}, sink=Ear())
    await log.stream.result
    channel.close("killed")  # END was seen but not confirmed

    def logged(states: dict[int, StreamState]) -> dict[int, int]:
        assert states[2].ended
        assert not states[4].ended
        return {2: 1000}

    channel, states = await Channel.reattach(keeper.dup(), logged=logged, budget=budget, on_lost=print)
    again = Log(bytearray(1000))
    again.stream = channel.adopt(2, states[2], sink=again)
    assert await asyncio.wait_for(again.stream.result, 5) == {"ok": {"bytes": 1000}}
    again.stream.confirm()
    await channel.ping(2)
    assert guest.lines == {}
    channel.close("over")
    assert budget.bytes_used == 0


def lying(**changes: object) -> dict[str, object]:
    stream = {"op": "exec", "opened": True, "sent": 0, "acked": 0, "received": 0, "eof_sent": False, "eof_received": False, "ended": False}  # fmt: skip
    return {"streams": {"2": {**stream, **changes}}, "highest_host": 2, "highest_guest": 0}


@pytest.mark.req("ISO-7")
@pytest.mark.parametrize(
    "lie", [{"sent": 2 * MIB}, {"sent": -1}, {"acked": 5}, {"sent": 600, "acked": 600}, {"sent": 10}]
)
async def test_a_lying_state_is_a_protocol_error(lie: dict[str, object]) -> None:
    """The last two are well formed, but the log stands at 500: the guest cannot go on from there."""
    keeper, theirs = pair()
    guest = FakeGuest(theirs, hello=False)
    guest.state_override = lying(**lie)
    guest.start()
    lost: list[str] = []
    with pytest.raises(ProtocolError):
        await Channel.reattach(keeper, logged=lambda _: {2: 500}, budget=Budget(MIB), on_lost=lost.append)
    assert lost == []
    assert keeper.fileno() == -1


@pytest.mark.req("ISO-7")
async def test_endless_garbage_is_unresponsive_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, theirs = pair()
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    garbage = random.Random(3).randbytes(MIB)

    async def shout() -> int:
        count = 0
        while True:
            await loop.sock_sendall(theirs, garbage)
            count += len(garbage)

    shouting = asyncio.create_task(shout())
    with pytest.raises(ProtocolError, match="unresponsive"):
        await Channel.reattach(keeper, logged=lambda _: {}, budget=Budget(MIB), on_lost=print, timeout_s=60, share=1.0)
    shouting.cancel()
    await asyncio.gather(shouting, return_exceptions=True)
    theirs.close()


@pytest.mark.req("ISO-7")
async def test_silence_is_unresponsive_by_time() -> None:
    keeper, theirs = pair()
    started = time.monotonic()
    with pytest.raises(ProtocolError, match="unresponsive"):
        await Channel.reattach(keeper, logged=lambda _: {}, budget=Budget(MIB), on_lost=print, timeout_s=0.2)
    assert time.monotonic() - started < 2
    theirs.close()


async def test_a_guest_that_was_still_booting_says_hello_before_state() -> None:
    keeper, theirs = pair()
    guest = FakeGuest(theirs, hello=True)
    guest.start()
    channel, states = await Channel.reattach(keeper, logged=lambda _: {}, budget=Budget(MIB), on_lost=print)
    assert states == {}
    assert channel.hello is None
    assert json.dumps((await channel.call("source", {"bytes": 3}))[0]) == '{"bytes": 3}'
    channel.close("over")
