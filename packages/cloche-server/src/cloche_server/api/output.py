"""A command's output: as events that can be resumed, or as a raw body for bulk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from cloche.wire.commands import Command, Cursor
from cloche.wire.errors import error
from cloche_server.api.asking import WAIT_S_MAX, Asked, DirectRoute, path_parameters, wants_events
from cloche_server.api.backend import OutputChunk
from cloche_server.api.streams import Piece, Stream, model_event, output_events

router = APIRouter(prefix="/v1", tags=["commands"], route_class=DirectRoute)

WAIT_AGAIN_S: Final = 0.1
_TRUTH: Final = {"": False, "0": False, "false": False, "1": True, "true": True}
_DESCRIPTION: Final[dict[str, Any]] = {
    "parameters": [
        *path_parameters("s", "c"),
        {
            "name": "from",
            "in": "query",
            "description": "A cursor: GENERATION.OFFSET, or an offset.",
            "schema": {"type": "string", "pattern": r"^[0-9]{1,20}(\.[0-9]{1,20})?$"},
        },
        {
            "name": "follow",
            "in": "query",
            "description": "Go on to the end of the output.",
            "schema": {"type": "boolean", "default": False},
        },
        {
            "name": "fd",
            "in": "query",
            "description": "Only this one: 1 or 2.",
            "schema": {"type": "integer", "enum": [1, 2]},
        },
        {
            "name": "Last-Event-ID",
            "in": "header",
            "description": "As `from`, and before it.",
            "schema": {"type": "string"},
        },
    ]
}


@router.get(
    "/sandboxes/{s}/commands/{c}/output",
    openapi_extra=_DESCRIPTION,
    response_class=Response,
    responses={
        200: {
            "description": "Events with `Accept: text/event-stream`, else the bytes; the header `Cloche-Cursor` is where they begin.",
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                "text/event-stream": {"schema": {"type": "string"}},
            },
        }
    },
)
async def read_output(request: Request) -> Response:
    asked = Asked.of(request)
    sandbox, command = request.path_params["s"], request.path_params["c"]
    query = request.query_params
    start = _cursor(request.headers.get("last-event-id") or query.get("from") or "0")
    follow = _TRUTH.get(query.get("follow", "").lower())
    if follow is None:
        raise error("invalid_request", "follow is true or false.")
    fd = {"": None, "1": 1, "2": 2}.get(query.get("fd", ""), 0)
    if fd == 0:
        raise error("invalid_request", "fd is 1 or 2.")
    if not wants_events(request):
        chunks = asked.backend.output(asked.caller, sandbox, command, start, follow=follow, fd=fd)
        return Stream(_raw(chunks), "application/octet-stream", headers={"Cloche-Cursor": str(start)}, patient=follow)
    if follow:
        return Stream(follow_events(asked, sandbox, command, start, fd=fd), "text/event-stream", patient=True)
    return Stream(_present_events(asked, sandbox, command, start, fd), "text/event-stream")


def _cursor(text: str) -> Cursor:
    try:
        return Cursor.parse(text)
    except ValueError:
        raise error("invalid_request", "from is a cursor: OFFSET or GENERATION.OFFSET, in digits.") from None


def closing(chunks: AsyncIterator[OutputChunk]) -> aclosing[AsyncGenerator[OutputChunk, None]]:
    """Backends yield from async generators; a reader who leaves must end them now, not at some collection."""
    return aclosing(cast("AsyncGenerator[OutputChunk, None]", chunks))


async def follow_events(
    asked: Asked, sandbox: str, command: str, start: Cursor, *, fd: int | None
) -> AsyncGenerator[Piece, None]:
    """Output to its end, then the command's end. The process may outlive its output: that is waited for."""
    async with closing(asked.backend.output(asked.caller, sandbox, command, start, follow=True, fd=fd)) as chunks:
        async for chunk in chunks:
            yield output_events(chunk)
    yield model_event("end", await ended_view(asked, sandbox, command))


async def ended_view(asked: Asked, sandbox: str, command: str) -> Command:
    """The view once the command has ended. A backend that answers sooner, and at once, must not hold up the loop."""
    view = await asked.backend.wait_command(asked.caller, sandbox, command, WAIT_S_MAX)
    while view.ended is None:
        await asyncio.sleep(WAIT_AGAIN_S)
        view = await asked.backend.wait_command(asked.caller, sandbox, command, WAIT_S_MAX)
    return view


async def _present_events(
    asked: Asked, sandbox: str, command: str, start: Cursor, fd: int | None
) -> AsyncGenerator[Piece, None]:
    async with closing(asked.backend.output(asked.caller, sandbox, command, start, follow=False, fd=fd)) as chunks:
        async for chunk in chunks:
            yield output_events(chunk)
    yield model_event("end", await asked.backend.get_command(asked.caller, sandbox, command))


async def _raw(chunks: AsyncIterator[OutputChunk]) -> AsyncGenerator[Piece, None]:
    async with closing(chunks) as open_chunks:
        async for chunk in open_chunks:
            yield chunk.data
