"""A guest's last words and its reset in one event: uvloop tells of both only once."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from cloche_server.channel.frames import Kind, encode
from cloche_server.channel.pump import Pump


async def hang_up() -> tuple[list[int], list[str]]:
    ours, theirs = socket.socketpair()
    kinds: list[int] = []
    reasons: list[str] = []

    def take(kind: int, stream: int, payload: memoryview) -> int:
        kinds.append(kind)
        return 0

    pump = Pump(ours, asyncio.get_running_loop(), take=take, failed=lambda reason, error: reasons.append(reason))
    pump.start()
    await asyncio.sleep(0.01)
    ours.send(b"never read")
    theirs.send(encode(Kind.PONG, 0, b"last words"))
    theirs.close()
    for _ in range(200):
        if reasons:
            break
        await asyncio.sleep(0.01)
    pump.close()
    return kinds, reasons


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_reset_is_seen_behind_the_last_words(run: Callable[[Awaitable[Any]], Any]) -> None:
    assert run(hang_up()) == ([Kind.PONG], ["io_error: ECONNRESET"])
