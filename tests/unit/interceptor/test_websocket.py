"""WebSocket through the real process, with the library that people use on both ends."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.unit.interceptor import authorities
from tests.unit.interceptor.conftest import World
from tests.unit.interceptor.gate import secret, wait_until

REAL = "real-value-of-the-token"
TOKEN = secret("TOKEN", REAL, "ws.test")
PH = str(TOKEN["placeholder"])
IN_BODY = secret("IN_BODY", "value-for-messages", "ws.test", places=[{"kind": "body", "name": None, "format": "{}"}])


class Chat:
    """Says what it hears, and on `leak` what it was given."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def __call__(self, connection: Any) -> None:
        credential = connection.request.headers.get("Authorization", "")
        async for message in connection:
            self.heard.append(message)
            if message == "leak":
                await connection.ping(credential.removeprefix("Bearer ").encode())
                await connection.send("raw " + credential)
                await connection.send(base64.b64encode(b"u:" + credential.encode()))
                await connection.close(4000, credential)
            elif message == "pieces":
                value = credential.removeprefix("Bearer ")
                for at in range(0, len(value), 6):
                    await connection.send(value[at : at + 6])
                await connection.send("and on")
            elif message == "large":
                await connection.send(bytes(20 << 20))
            else:
                await connection.send(message)


@pytest.fixture(scope="module")
def chat(world: World) -> Iterator[Chat]:
    chat = Chat()
    context = authorities.server_context(world.directory, world.leaf, "http/1.1")

    async def start() -> Any:
        return await serve(chat, "127.0.0.1", 0, ssl=context, max_size=None)

    server = world.loop.run(start())
    world.gate.upstreams[("ws.test", 443)] = next(iter(server.sockets)).getsockname()
    yield chat

    async def stop() -> None:
        server.close()
        await asyncio.wait_for(server.wait_closed(), 10)

    world.loop.run(stop())


def _connect(world: World, *secrets: dict[str, Any], **headers: str) -> ClientConnection:
    world.gate.sandbox("s2", *secrets)
    port = world.gate.listen("ws.test", sandbox="s2")
    context = ssl.create_default_context(cadata=world.lineage.cert)
    plain = socket.create_connection(("127.0.0.1", port))
    return connect(
        "wss://ws.test/chat", sock=plain, ssl=context, additional_headers=headers, max_size=None, ping_interval=None
    )


@pytest.mark.req("SEC-2")
def test_messages_pass_both_ways_and_the_credential_goes_in(world: World, chat: Chat) -> None:
    with _connect(world, TOKEN, Authorization=f"Bearer {PH}") as talk:
        assert talk.response is not None
        assert "Sec-WebSocket-Extensions" not in talk.response.headers
        for message in ("hello", b"\x00\xff" * 50_000, "x" * 1_000_000):
            talk.send(message)
            assert talk.recv(timeout=10) == message
        talk.send(["in ", "three ", "parts"])
        assert talk.recv(timeout=10) == "in three parts"


@pytest.mark.req("SEC-3")
def test_the_value_does_not_come_back(world: World, chat: Chat) -> None:
    with _connect(world, TOKEN, Authorization=f"Bearer {PH}") as talk:
        talk.send("leak")
        raw = talk.recv(timeout=10)
        coded = talk.recv(timeout=10)
        with pytest.raises(ConnectionClosed) as closed:
            talk.recv(timeout=10)
    assert raw == f"raw Bearer {PH[: len(REAL)]}"
    assert isinstance(coded, bytes)
    assert base64.b64encode(b"u:Bearer " + REAL.encode())[14:-4] not in coded
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 4000
    assert REAL not in closed.value.rcvd.reason


@pytest.mark.req("SEC-3")
def test_a_value_in_several_messages_is_not_completed(world: World, chat: Chat) -> None:
    """Messages are not held back for what may follow. The one that would complete the value ends the connection."""
    got: list[str | bytes] = []
    with _connect(world, TOKEN, Authorization=f"Bearer {PH}") as talk:
        talk.send("pieces")
        with pytest.raises(ConnectionClosed) as closed:
            got.extend(talk)
    assert "".join(map(str, got)) == REAL[:18]
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008
    wait_until(lambda: [m for m in world.gate.of("denied") if m["code"] == "secret_in_answer"], "the denial")


@pytest.mark.req("SEC-3")
@pytest.mark.parametrize("text", [PH, base64.b64encode(b"." + PH.encode()).decode(), PH.encode().hex()])
def test_a_placeholder_in_a_message_is_blocked(world: World, chat: Chat, text: str) -> None:
    alerts = len(world.gate.of("alert"))
    with _connect(world, TOKEN) as talk:
        talk.send(f"my key is {text}")
        with pytest.raises(ConnectionClosed) as closed:
            talk.recv(timeout=10)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008
    wait_until(lambda: len(world.gate.of("alert")) == alerts + 1, "the alert")
    assert not any(text in str(heard) for heard in chat.heard)


@pytest.mark.req("SEC-3")
def test_a_placeholder_in_a_ping_is_blocked(world: World, chat: Chat) -> None:
    alerts = len(world.gate.of("alert"))
    with _connect(world, TOKEN) as talk:
        talk.ping(PH)
        with pytest.raises(ConnectionClosed):
            talk.recv(timeout=10)
    assert len(world.gate.of("alert")) == alerts + 1


@pytest.mark.req("SEC-2")
def test_a_message_gets_a_value_whose_place_is_the_body(world: World, chat: Chat) -> None:
    with _connect(world, TOKEN, IN_BODY) as talk:
        talk.send(f"login {IN_BODY['placeholder']}")
        assert "value-for-messages" not in str(talk.recv(timeout=10))
    assert chat.heard[-1] == "login value-for-messages"


def _send_and_hear(talk: ClientConnection, message: bytes) -> None:
    talk.send(message)
    talk.recv(timeout=30)


def test_a_message_that_is_too_long_ends_the_connection(world: World, chat: Chat) -> None:
    with _connect(world, TOKEN) as talk:
        talk.send("large")
        with pytest.raises(ConnectionClosed):
            talk.recv(timeout=30)
    with _connect(world) as talk:
        with pytest.raises(ConnectionClosed):
            _send_and_hear(talk, bytes(20 << 20))
    assert world.gate.peak_bytes() <= 200_000_000
