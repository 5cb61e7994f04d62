"""A terminal over a WebSocket: keys up, screen down, and a cursor with which another connection goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, WebSocket
from pydantic import ValidationError
from starlette.websockets import WebSocketDisconnect

from cloche.wire.commands import Command, Cursor, Resize
from cloche.wire.errors import ClocheError, error
from cloche_server.api.asking import Asked
from cloche_server.api.output import closing, ended_view
from cloche_server.api.problems import invalid_fields

router = APIRouter(prefix="/v1")

RETRIES_MAX = 3
"""How often keys are sent again when another terminal wrote to the same command in between."""


@router.websocket("/sandboxes/{s}/commands/{c}/terminal")
async def attach_terminal(socket: WebSocket) -> None:
    asked = Asked.of(socket)
    sandbox, name = socket.path_params["s"], socket.path_params["c"]
    command = await asked.backend.get_command(asked.caller, sandbox, name)
    if not command.terminal:
        raise error("no_terminal", "The command has no terminal.")
    try:
        start = Cursor.parse(socket.query_params.get("from") or f"{command.output.generation}.{command.output.first}")
    except ValueError:
        raise error("invalid_request", "from is a cursor: OFFSET or GENERATION.OFFSET, in digits.") from None
    await socket.accept()
    keys = asyncio.ensure_future(_keys(asked, socket, command))
    screen = asyncio.ensure_future(_screen(asked, socket, command, start))
    try:
        await asyncio.wait({keys, screen}, return_when=asyncio.FIRST_COMPLETED)
        for task in (screen, keys):
            if task.done():
                task.result()
    except WebSocketDisconnect:
        return
    finally:
        keys.cancel()
        screen.cancel()
        await asyncio.wait({keys, screen})
    with contextlib.suppress(WebSocketDisconnect):  # he may leave at the same moment
        await socket.close()


async def _screen(asked: Asked, socket: WebSocket, command: Command, start: Cursor) -> None:
    """A cursor is sent where the bytes do not simply go on; else the reader counts them himself."""
    at = (0, 0)
    chunks = asked.backend.output(asked.caller, command.sandbox, command.id, start, follow=True, fd=None)
    async with closing(chunks) as open_chunks:
        async for chunk in open_chunks:
            if at != (chunk.generation, chunk.offset):
                await socket.send_text(json.dumps({"cursor": f"{chunk.generation}.{chunk.offset}"}))
            await socket.send_bytes(bytes(chunk.data))
            at = (chunk.generation, chunk.offset + len(chunk.data))
    view = await ended_view(asked, command.sandbox, command.id)
    await socket.send_text(f'{{"end": {view.model_dump_json(by_alias=True)}}}')


async def _keys(asked: Asked, socket: WebSocket, command: Command) -> None:
    offset = command.stdin_offset
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1005))
        data = message.get("bytes")
        if data:
            offset = await _type(asked, command, offset, data)
        elif message.get("text"):
            await _control(asked, command, message["text"])


async def _type(asked: Asked, command: Command, offset: int, data: bytes) -> int:
    for _ in range(RETRIES_MAX):
        try:
            state = await asked.backend.write_stdin(
                asked.caller, command.sandbox, command.id, offset, _once(data), eof=False
            )
            return state.offset
        except ClocheError as raised:
            if raised.code in ("command_ended", "stdin_closed", "sandbox_ended"):
                return offset  # typed after the end: the screen task is about to say so
            if raised.code != "stdin_offset":
                raise
            offset = (await asked.backend.get_command(asked.caller, command.sandbox, command.id)).stdin_offset
    raise error("stdin_offset", "Another terminal writes to the same command all the time.")


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _control(asked: Asked, command: Command, text: str) -> None:
    try:
        document: Any = json.loads(text)
        resize = Resize.model_validate(document["resize"])
    except ValidationError as raised:
        raise invalid_fields(raised) from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise error("invalid_request", 'A text frame is {"resize": {"rows": …, "cols": …}}.') from None
    try:
        await asked.backend.resize(asked.caller, command.sandbox, command.id, resize.rows, resize.cols)
    except ClocheError as raised:
        if raised.code != "command_ended":
            raise
