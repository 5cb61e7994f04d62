"""Commands: start (with or without following), look, wait, signal, resize, end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from cloche.wire.commands import Command, CommandList, Cursor, Resize, Signal, StartCommand
from cloche.wire.errors import error
from cloche_server.api.asking import (
    WAIT_S_MAX,
    Asked,
    Asking,
    CommandName,
    DirectRoute,
    SandboxName,
    checked_key,
    json_body,
    json_response,
    path_parameters,
    wants_events,
)
from cloche_server.api.output import follow_events
from cloche_server.api.streams import Piece, Stream, model_event

router = APIRouter(prefix="/v1", tags=["commands"])
hot = APIRouter(prefix="/v1", tags=["commands"], route_class=DirectRoute)

COMPANY_S: Final = 0.01
"""How long `command` waits for output or the end: a quick command is one write, and its reader is woken once."""
EVENTS: Final[dict[str, Any]] = {"text/event-stream": {"schema": {"type": "string"}}}

_START: Final[dict[str, Any]] = {
    "parameters": [
        *path_parameters("s"),
        {
            "name": "Idempotency-Key",
            "in": "header",
            "description": "A repeat with the same key answers with the first one's command.",
            "schema": {"type": "string", "minLength": 1, "maxLength": 128},
        },
    ],
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/StartCommand"}}},
    },
}
_GET: Final[dict[str, Any]] = {
    "parameters": [
        *path_parameters("s", "c"),
        {
            "name": "wait_s",
            "in": "query",
            "description": "Answer at the end, at the latest after this time.",
            "schema": {"type": "number", "minimum": 0, "maximum": WAIT_S_MAX},
        },
    ]
}


@hot.post(
    "/sandboxes/{s}/commands",
    status_code=202,
    response_model=Command,
    openapi_extra=_START,
    responses={200: {"description": "With `Accept: text/event-stream`: `command`, output, `end`.", "content": EVENTS}},
)
async def start_command(request: Request) -> Response:
    asked = Asked.of(request)
    body = await json_body(request, StartCommand)
    key = checked_key(request.headers.get("idempotency-key"))
    command = await asked.backend.start_command(asked.caller, request.path_params["s"], body, key)
    if not wants_events(request):
        return json_response(command, 202)
    return Stream(_command_events(asked, command), "text/event-stream", first_waits_s=COMPANY_S)


async def _command_events(asked: Asked, command: Command) -> AsyncGenerator[Piece, None]:
    yield model_event("command", command)
    start = Cursor(generation=command.output.generation, offset=command.output.first)
    async for piece in follow_events(asked, command.sandbox, command.id, start, fd=None):
        yield piece


@router.get("/sandboxes/{s}/commands")
async def list_commands(asked: Asking, s: SandboxName) -> CommandList:
    return CommandList(commands=await asked.backend.list_commands(asked.caller, s))


@hot.get("/sandboxes/{s}/commands/{c}", response_model=Command, openapi_extra=_GET)
async def get_command(request: Request) -> Response:
    asked = Asked.of(request)
    sandbox, command = request.path_params["s"], request.path_params["c"]
    wait_s = _wait_seconds(request.query_params.get("wait_s"))
    if wait_s:
        return json_response(await asked.backend.wait_command(asked.caller, sandbox, command, wait_s))
    return json_response(await asked.backend.get_command(asked.caller, sandbox, command))


def _wait_seconds(text: str | None) -> float:
    try:
        value = float(text or 0)
    except ValueError:
        value = -1.0
    if not 0 <= value <= WAIT_S_MAX:  # also false for nan
        raise error("invalid_request", f"wait_s is a number from 0 to {WAIT_S_MAX:g}.")
    return value


@router.get("/commands/{c}")
async def find_command(asked: Asking, c: CommandName) -> Command:
    """Searched among all that the caller may see."""
    return await asked.backend.get_command(asked.caller, None, c)


@router.post("/sandboxes/{s}/commands/{c}/signal", status_code=204)
async def signal_command(asked: Asking, s: SandboxName, c: CommandName, body: Signal) -> None:
    await asked.backend.signal(asked.caller, s, c, body.signal)


@router.post("/sandboxes/{s}/commands/{c}/resize", status_code=204)
async def resize_command(asked: Asking, s: SandboxName, c: CommandName, body: Resize) -> None:
    await asked.backend.resize(asked.caller, s, c, body.rows, body.cols)


@router.delete("/sandboxes/{s}/commands/{c}")
async def kill_command(asked: Asking, s: SandboxName, c: CommandName) -> Command:
    return await asked.backend.kill_command(asked.caller, s, c)
