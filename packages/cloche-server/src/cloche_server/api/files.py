"""Single files and directories."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from cloche.wire.defaults import DISK_BYTES_MAX
from cloche.wire.files import Entry, EntryList, MakeDirectory, Move, Removed, WatchEvent, Written
from cloche_server.api.asking import Asking, GuestPath, GuestUser, SandboxName, body_parts, guest_path, json_response
from cloche_server.api.stdin import BYTES_BODY
from cloche_server.api.streams import Piece, Stream, model_event

router = APIRouter(prefix="/v1/sandboxes/{s}/files", tags=["files"])

OFFSET_MAX: Final = 2**62
DEPTH_MAX: Final = 64
BYTES: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The bytes.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
WATCH: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "`change` events; their data is a WatchEvent.",
        "content": {"text/event-stream": {"schema": {"$ref": "#/components/schemas/WatchEvent"}}},
    }
}


@router.get("", response_class=Response, responses=BYTES)
async def read_file(
    asked: Asking,
    request: Request,
    s: SandboxName,
    path: GuestPath,
    offset: Annotated[int, Query(ge=0, le=OFFSET_MAX)] = 0,
    length: Annotated[int | None, Query(ge=0, le=OFFSET_MAX)] = None,
    user: GuestUser = None,
) -> Response:
    source = asked.backend.read_file(
        asked.caller, s, guest_path(path, request), offset=offset, length=length, user=user
    )
    return Stream(pieces(source), "application/octet-stream")


async def pieces(source: AsyncIterator[bytes]) -> AsyncGenerator[Piece, None]:
    async with aclosing(cast("AsyncGenerator[bytes, None]", source)) as parts:
        async for part in parts:
            yield part


@router.put("", openapi_extra=BYTES_BODY)
async def write_file(
    asked: Asking,
    request: Request,
    s: SandboxName,
    path: GuestPath,
    mode: Annotated[str | None, Query(description="Octal, as chmod takes it.", pattern="^[0-7]{1,4}$")] = None,
    parents: Annotated[bool, Query(description="Make the directories above it.")] = False,
    append: Annotated[bool, Query()] = False,
    user: GuestUser = None,
) -> Written:
    written = await asked.backend.write_file(
        asked.caller,
        s,
        guest_path(path, request),
        body_parts(request, DISK_BYTES_MAX),
        mode=None if mode is None else int(mode, 8),
        make_parents=parents,
        append=append,
        user=user,
    )
    return Written(bytes=written)


@router.delete("")
async def remove_file(
    asked: Asking,
    request: Request,
    s: SandboxName,
    path: GuestPath,
    recursive: Annotated[bool, Query()] = False,
    user: GuestUser = None,
) -> Removed:
    return Removed(
        removed=await asked.backend.remove(asked.caller, s, guest_path(path, request), recursive=recursive, user=user)
    )


@router.get("/stat", response_model=Entry)
async def stat_file(
    asked: Asking,
    request: Request,
    s: SandboxName,
    path: GuestPath,
    follow: Annotated[bool, Query(description="The file behind a link, not the link.")] = True,
    user: GuestUser = None,
) -> Response:
    return json_response(await asked.backend.stat(asked.caller, s, guest_path(path, request), follow=follow, user=user))


@router.get("/list", response_model=EntryList)
async def list_files(
    asked: Asking,
    request: Request,
    s: SandboxName,
    path: GuestPath,
    depth: Annotated[int, Query(ge=1, le=DEPTH_MAX)] = 1,
    user: GuestUser = None,
) -> Response:
    found = await asked.backend.list_files(asked.caller, s, guest_path(path, request), depth=depth, user=user)
    return json_response(found)


@router.post("/mkdir", status_code=204)
async def make_directory(asked: Asking, s: SandboxName, body: MakeDirectory) -> None:
    guest_path(body.path)
    await asked.backend.make_directory(asked.caller, s, body)


@router.post("/move", status_code=204)
async def move_file(asked: Asking, s: SandboxName, body: Move) -> None:
    guest_path(body.source)
    guest_path(body.target)
    await asked.backend.move(asked.caller, s, body)


@router.get("/watch", response_class=Response, responses=WATCH)
async def watch_files(
    asked: Asking,
    request: Request,
    s: SandboxName,
    path: GuestPath,
    recursive: Annotated[bool, Query()] = False,
    user: GuestUser = None,
) -> Response:
    source = asked.backend.watch(asked.caller, s, guest_path(path, request), recursive=recursive, user=user)
    return Stream(_changes(source), "text/event-stream", patient=True)


async def _changes(source: AsyncIterator[WatchEvent]) -> AsyncGenerator[Piece, None]:
    async with aclosing(cast("AsyncGenerator[WatchEvent, None]", source)) as events:
        async for event in events:
            yield model_event("change", event)
