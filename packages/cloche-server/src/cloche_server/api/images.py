"""Images: what is here, pulling, importing, building; and what an administrator does to the store.

What takes long answers with events: `event: image`, its data an ImageEvent, the last one of kind `done`. What goes wrong
before the first is a status; later it is `event: error`, as for every stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Query, Request
from pydantic import ValidationError
from starlette.responses import Response

from cloche.wire.defaults import GIB
from cloche.wire.errors import error
from cloche.wire.images import (
    BuildOptions,
    FsckReport,
    GcImages,
    GcResult,
    ImageEvent,
    ImageList,
    ImageView,
    PullImage,
)
from cloche_server.api.asking import Asked, Asking, body_parts
from cloche_server.api.files import pieces
from cloche_server.api.problems import invalid_fields
from cloche_server.api.streams import Piece, Stream, model_event

router = APIRouter(prefix="/v1/images", tags=["images"])

ARCHIVE_BYTES_MAX: Final = 64 * GIB
CONTEXT_BYTES_MAX: Final = 16 * GIB
NAME_MAX: Final = 512
OPTIONS_MAX: Final = 48 * 1024
"""Of a build's options in the query; what a server takes as a request's first line is a little more."""

_TAR: Final = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}
_TAR_BODY: Final = {"requestBody": {"required": True, "content": _TAR}}
_TAR_ANSWER: Final[dict[int | str, dict[str, Any]]] = {200: {"description": "An OCI layout as a tar.", "content": _TAR}}
_EVENT: Final = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "enum": ["image", "error"]},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/ImageEvent"},
        },
    },
}
_EVENTS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "`image` events; their data is an ImageEvent, the last one's kind is `done`.",
        "content": {"text/event-stream": {"schema": _EVENT}},
    }
}

ImageName = Annotated[
    str, Query(description="A name, or a digest of one that is here.", min_length=1, max_length=NAME_MAX)
]
NewName = Annotated[
    str | None, Query(description="Instead of the name in the archive.", min_length=1, max_length=NAME_MAX)
]
Options = Annotated[str, Query(description="BuildOptions, as JSON.", max_length=OPTIONS_MAX)]


@router.get("")
async def list_images(asked: Asking) -> ImageList:
    """Those that the caller may use."""
    return ImageList(images=await asked.backend.list_images(asked.caller))


@router.get("/inspect")
async def inspect_image(asked: Asking, image: ImageName) -> ImageView:
    return await asked.backend.inspect_image(asked.caller, image)


@router.post("/pull", response_class=Response, responses=_EVENTS)
async def pull_image(asked: Asking, body: PullImage) -> Response:
    return Stream(_events(asked.backend.pull_image(asked.caller, body)), "text/event-stream", patient=True)


@router.post("/import", response_class=Response, responses=_EVENTS, openapi_extra=_TAR_BODY)
async def import_image(asked: Asking, request: Request, name: NewName = None) -> Response:
    """A `docker save` tar, or an OCI layout as a tar."""
    body = _Body(request, ARCHIVE_BYTES_MAX)
    return _answer_after(body, asked.backend.import_image(asked.caller, body.parts(), name))


@router.get("/export", response_class=Response, responses=_TAR_ANSWER)
async def export_image(asked: Asking, image: ImageName) -> Response:
    return Stream(pieces(asked.backend.export_image(asked.caller, image)), "application/x-tar")


@router.post("/build", response_class=Response, responses=_EVENTS, openapi_extra=_TAR_BODY)
async def build_image(asked: Asking, request: Request, options: Options = "{}") -> Response:
    """The body is the context, as a tar."""
    try:
        wanted = BuildOptions.model_validate_json(options)
    except ValidationError as raised:
        raise invalid_fields(raised) from None
    body = _Body(request, CONTEXT_BYTES_MAX)
    return _answer_after(body, asked.backend.build_image(asked.caller, body.parts(), wanted))


@router.delete("")
async def remove_image(asked: Asking, image: ImageName) -> ImageView:
    """A name; the image goes with its last one. By digest: the image with all the caller's names. Answers what it was."""
    return await asked.backend.remove_image(asked.caller, image)


@router.post("/gc")
async def collect_images(asked: Asking, body: GcImages) -> GcResult:
    """Removes what nobody uses, the oldest first. For an administrator."""
    _check_admin(asked, "Removing images that others pulled")
    return await asked.backend.gc_images(asked.caller, body)


@router.post("/fsck")
async def check_images(
    asked: Asking,
    repair: Annotated[bool, Query(description="Remove what is broken; for an administrator.")] = False,
) -> FsckReport:
    """Reads the whole store and compares it with its hashes."""
    if repair:
        _check_admin(asked, "Repairing the store")
    return await asked.backend.fsck_images(asked.caller, repair=repair)


def _check_admin(asked: Asked, what: str) -> None:
    if not asked.caller.is_admin:
        raise error(
            "forbidden",
            f"{what} is for the node's administrator.",
            fix="Ask the machine's administrator; your own images go with: cloche image rm NAME",
        )


class _Body:
    """A request's body, which must be read to its end before the answer begins: both are read from one place."""

    def __init__(self, request: Request, bytes_max: int) -> None:
        self.ended = asyncio.Event()
        self._request = request
        self._bytes_max = bytes_max

    async def parts(self) -> AsyncIterator[bytes]:
        async for part in body_parts(self._request, self._bytes_max):
            yield part
        self.ended.set()


def _answer_after(body: _Body, source: AsyncIterator[ImageEvent]) -> Response:
    return Stream(_events(source), "text/event-stream", patient=True, after=body.ended)


async def _events(source: AsyncIterator[ImageEvent]) -> AsyncGenerator[Piece, None]:
    async with aclosing(cast("AsyncGenerator[ImageEvent, None]", source)) as events:
        async for event in events:
            yield model_event("image", event)
