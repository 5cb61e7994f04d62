"""A command's stdin, by offset: what was confirmed is skipped, so a retry can do no harm."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request

from cloche.wire.commands import StdinState
from cloche.wire.defaults import GIB
from cloche_server.api.asking import Asking, CommandName, SandboxName, body_parts

router = APIRouter(prefix="/v1", tags=["commands"])

STDIN_BYTES_MAX: Final = 64 * GIB
"""Of one request; a command may get any number of them."""

BYTES_BODY: Final = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.put("/sandboxes/{s}/commands/{c}/stdin", openapi_extra=BYTES_BODY)
async def write_stdin(
    asked: Asking,
    request: Request,
    s: SandboxName,
    c: CommandName,
    offset: Annotated[int, Query(description="Where the body begins in the command's stdin.", ge=0, le=2**62)] = 0,
    eof: Annotated[bool, Query(description="Close stdin after the body.")] = False,
) -> StdinState:
    parts = body_parts(request, STDIN_BYTES_MAX, idle_s=None)
    return await asked.backend.write_stdin(asked.caller, s, c, offset, parts, eof=eof)
