"""The way out of a sandbox: what it tried, what it may reach for a while, and why.

Following answers with events: `event: record`, its data an EgressRecord, its id the record's number. They go on until the
sandbox has ended and everything was told; then comes `event: end`. Only from outside: nothing inside a sandbox can reach this API.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from cloche.wire.egress import EgressRecord, Explanation, Grant, GrantList, GrantView
from cloche_server.api.asking import Asking, SandboxName, json_response
from cloche_server.api.problems import json_bytes
from cloche_server.api.streams import Piece, Stream

router = APIRouter(prefix="/v1/sandboxes/{s}/egress", tags=["egress"])

RECORDS_MAX: Final = 1000
TARGET_MAX: Final = 300
_EVENT: Final = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "event": {"type": "string", "enum": ["record", "end", "error"]},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {"$ref": "#/components/schemas/EgressRecord"},
        },
    },
}
_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "What there is; with `follow`, `record` events as they come.",
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/EgressRecords"}},
            "text/event-stream": {"schema": _EVENT},
        },
    }
}

After = Annotated[int, Query(description="Only records with a higher number.", ge=0, le=2**62)]
GrantId = Annotated[str, Path(max_length=64)]


@router.get("", response_class=Response, responses=_ANSWERS)
async def list_egress(
    asked: Asking,
    request: Request,
    s: SandboxName,
    after: After = 0,
    limit: Annotated[int, Query(ge=1, le=RECORDS_MAX)] = 100,
    follow: Annotated[bool, Query(description="Go on with records as they come.")] = False,
) -> Response:
    """Every attempt to get out, allowed or not, oldest first."""
    if follow:
        last = request.headers.get("last-event-id", "")
        start = max(after, int(last)) if last.isascii() and last.isdigit() and len(last) < 19 else after
        return Stream(
            _events(asked.backend.follow_egress(asked.caller, s, after=start)), "text/event-stream", patient=True
        )
    return json_response(await asked.backend.egress_records(asked.caller, s, after=after, limit=limit))


@router.post("/grants", status_code=201)
async def grant_egress(asked: Asking, s: SandboxName, body: Grant) -> GrantView:
    """Lets a running sandbox reach one more host, for a while. The organisation's denials still hold."""
    return await asked.backend.grant_egress(asked.caller, s, body)


@router.get("/grants")
async def list_grants(asked: Asking, s: SandboxName) -> GrantList:
    return GrantList(grants=await asked.backend.list_grants(asked.caller, s))


@router.delete("/grants/{g}")
async def revoke_grant(asked: Asking, s: SandboxName, g: GrantId) -> GrantList:
    """Takes it back; connections that it let out are cut. Answers those that are left."""
    return GrantList(grants=await asked.backend.revoke_grant(asked.caller, s, g))


@router.get("/explain")
async def explain_egress(
    asked: Asking,
    s: SandboxName,
    target: Annotated[str, Query(description="HOST:PORT, or a URL.", min_length=1, max_length=TARGET_MAX)],
    method: Annotated[str | None, Query(pattern=r"^[A-Z]{1,32}$")] = None,
) -> Explanation:
    """What its policy says of a target, by which rule. Nothing is resolved, dialled or recorded."""
    return await asked.backend.explain_egress(asked.caller, s, target=target, method=method)


async def _events(source: AsyncIterator[EgressRecord]) -> AsyncGenerator[Piece, None]:
    async with aclosing(cast("AsyncGenerator[EgressRecord, None]", source)) as records:
        async for record in records:
            yield b"id: %d\nevent: record\ndata: %b\n\n" % (record.seq, json_bytes(record))
    yield b"event: end\ndata: {}\n\n"
