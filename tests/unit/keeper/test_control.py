"""A sentry that lies, stalls or never ends on its control socket: bounded, typed, and the loop goes on."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cloche_server.engines.contract import EngineError
from cloche_server.engines.gvisor import control
from cloche_server.engines.gvisor.control import Control

pytestmark = [pytest.mark.req("ISO-7")]
Sentry = Callable[[socket.socket], Coroutine[Any, Any, None]]


async def call(sentry: Sentry) -> int:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    task = asyncio.create_task(sentry(theirs))
    client = Control(ours, "s" + "c" * 19)
    try:
        return await client.processes()
    finally:
        task.cancel()
        await asyncio.wait([task])
        client.close()
        theirs.close()


def says(*parts: bytes, pause_s: float = 0.0) -> Sentry:
    async def sentry(end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        asked = json.loads(await loop.sock_recv(end, 4096))
        assert asked["method"] == "containerManager.Processes"
        for part in parts:
            await loop.sock_sendall(end, part)
            await asyncio.sleep(pause_s)
        await asyncio.sleep(60)

    return sentry


async def test_an_honest_answer() -> None:
    assert await call(says(b'{"success":true,"err":"","result":[{"pid":1},{"pid":2}]}')) == 2


async def test_an_answer_in_pieces() -> None:
    assert await call(says(b'{"success":true,', b'"result":[{}', b",{}]}", pause_s=0.01)) == 2


async def test_braces_in_strings_are_text() -> None:
    parts = (b'{"success":true,"err":"}', b'\\"}\\\\', b'","result":["{[", {"a":"\\', b'"}]"}]}')
    assert json.loads(b"".join(parts))["result"] == ["{[", {"a": '"}]'}]
    assert await call(says(*parts, pause_s=0.01)) == 2


async def test_a_refusal_is_escaped() -> None:
    with pytest.raises(EngineError) as caught:
        await call(says(b'{"success":false,"err":"\\u001b]52;c;AAAA\\u0007"}'))
    assert caught.value.code == "host_failure"
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("text", [b"[" * 5000 + b"}", b'{"a":' * 5000 + b"}", b"[1,2]}", b"7}"])
async def test_garbage_is_no_answer(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CALL_S", 0.3)
    with pytest.raises(EngineError) as caught:
        await call(says(text))
    assert caught.value.code in ("protocol_error", "unresponsive")


async def test_an_endless_answer() -> None:
    async def sentry(end: socket.socket) -> None:
        while True:
            await asyncio.get_running_loop().sock_sendall(end, b'{"result":"' + b"x" * 65536)

    with pytest.raises(EngineError) as caught:
        await call(sentry)
    assert caught.value.code == "protocol_error"


async def test_many_closing_braces_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece ends like an answer: parsing each time anew must not become quadratic work."""
    monkeypatch.setattr(control, "CALL_S", 5.0)

    async def sentry(end: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(end, b'{"a":"')
        while True:
            await asyncio.get_running_loop().sock_sendall(end, b"x" * 999 + b"}")
            await asyncio.sleep(0)

    before = time.process_time()
    with pytest.raises(EngineError):
        await call(sentry)
    assert time.process_time() - before < 2.0


async def test_silence_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CALL_S", 0.2)
    with pytest.raises(EngineError) as caught:
        await call(says())
    assert caught.value.code == "unresponsive"


async def test_a_closed_connection_ends() -> None:
    async def sentry(end: socket.socket) -> None:
        await asyncio.get_running_loop().sock_recv(end, 4096)
        end.shutdown(socket.SHUT_RDWR)

    with pytest.raises(EngineError) as caught:
        await call(sentry)
    assert caught.value.code == "host_failure"


async def test_a_cut_off_call_leaves_no_answer_for_the_next() -> None:
    ours, theirs = socket.socketpair()
    client = Control(ours, "s" + "c" * 19)
    first = asyncio.create_task(client.processes())
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait([first])
    with pytest.raises(BrokenPipeError):
        theirs.sendall(b'{"success":true,"result":[1,2,3]}')
    with pytest.raises(EngineError):
        await client.processes()
    theirs.close()
