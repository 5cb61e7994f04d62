"""The journal, as its owner may read it."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query

from cloche.wire.nodes import EventList
from cloche_server.api.asking import Asking

router = APIRouter(prefix="/v1/events", tags=["node"])

EVENTS_MAX: Final = 1000


@router.get("")
async def list_events(
    asked: Asking,
    sandbox: Annotated[str | None, Query(description="Only this sandbox's.", max_length=64)] = None,
    after: Annotated[int, Query(description="Only those with a higher number.", ge=0, le=2**62)] = 0,
    limit: Annotated[int, Query(ge=1, le=EVENTS_MAX)] = 100,
) -> EventList:
    return await asked.backend.events(asked.caller, sandbox, after=after, limit=limit)
