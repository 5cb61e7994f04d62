"""A connection to a port inside, over a WebSocket: bytes as binary frames, `{"eof": true}` for a half-close."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from fastapi import APIRouter, WebSocket
from starlette.websockets import WebSocketDisconnect

from cloche.wire.errors import error
from cloche_server.api.asking import Asked
from cloche_server.api.backend import Duplex

router = APIRouter(prefix="/v1")

EOF: Final = '{"eof": true}'


@router.websocket("/sandboxes/{s}/ports/{n}")
async def connect_port(socket: WebSocket) -> None:
    asked = Asked.of(socket)
    text = socket.path_params["n"]
    port = int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else 0
    if not 1 <= port <= 65535:
        raise error("invalid_request", "A port is a number from 1 to 65535.")
    inside = await asked.backend.connect_port(asked.caller, socket.path_params["s"], port)
    try:
        await socket.accept()
        await _couple(socket, inside)
    except WebSocketDisconnect:
        return
    finally:
        await inside.close()


async def _couple(socket: WebSocket, inside: Duplex) -> None:
    """Over when both directions had their end of file, when one breaks, or when the client leaves."""
    client_done = asyncio.Event()
    up = asyncio.ensure_future(_up(socket, inside, client_done))
    both = asyncio.ensure_future(_down(socket, inside, client_done))
    try:
        done, _ = await asyncio.wait({up, both}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        up.cancel()
        both.cancel()
        await asyncio.wait({up, both})
    await socket.close()


async def _down(socket: WebSocket, inside: Duplex, client_done: asyncio.Event) -> None:
    while data := await inside.receive():
        await socket.send_bytes(data)
    await socket.send_text(EOF)
    await client_done.wait()


async def _up(socket: WebSocket, inside: Duplex, client_done: asyncio.Event) -> None:
    """Goes on reading after the client's end of file: only so is it noticed that he left."""
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1005))
        data = message.get("bytes")
        if data and not client_done.is_set():
            await inside.send(data)
        elif message.get("text"):
            _check_eof(message["text"])
            await inside.send_eof()
            client_done.set()


def _check_eof(text: str) -> None:
    try:
        document: Any = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if document != {"eof": True}:
        raise error("invalid_request", 'A text frame is {"eof": true}.')
