"""Whole trees, as tar streams: what `cloche cp` carries."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from cloche.wire.defaults import DISK_BYTES_MAX
from cloche.wire.files import TreeResult
from cloche_server.api.asking import Asking, GuestPath, GuestUser, SandboxName, body_parts, guest_path, json_response
from cloche_server.api.files import pieces
from cloche_server.api.streams import Stream

router = APIRouter(prefix="/v1/sandboxes/{s}/tree", tags=["files"])

_TAR: Final = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
_TAR_ANSWER: Final[dict[int | str, dict[str, Any]]] = {
    200: {"description": "A tar stream; its last entry, `.cloche-result.json`, is a TreeResult.", "content": _TAR}
}
_TAR_BODY: Final = {"requestBody": {"required": True, "content": _TAR}}


@router.get("", response_class=Response, responses=_TAR_ANSWER)
async def read_tree(
    asked: Asking, request: Request, s: SandboxName, path: GuestPath, user: GuestUser = None
) -> Response:
    source = asked.backend.read_tree(asked.caller, s, guest_path(path, request), user=user)
    return Stream(pieces(source), "application/x-tar")


@router.put("", openapi_extra=_TAR_BODY, response_model=TreeResult)
async def write_tree(
    asked: Asking,
    request: Request,
    s: SandboxName,
    path: GuestPath,
    overwrite: Annotated[bool, Query(description="Replace files that are there.")] = False,
    user: GuestUser = None,
) -> Response:
    parts = body_parts(request, DISK_BYTES_MAX)
    where = guest_path(path, request)
    return json_response(await asked.backend.write_tree(asked.caller, s, where, parts, overwrite=overwrite, user=user))
