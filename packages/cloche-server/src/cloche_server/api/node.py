"""The node itself: what it is, what it keeps on disk, and a sign of life."""

from __future__ import annotations

from fastapi import APIRouter

from cloche.wire.nodes import DiskUse, NodeView, Pruned
from cloche_server.api.asking import Asking

router = APIRouter(tags=["node"])


@router.get("/healthz")
async def healthz() -> dict[str, bool]:
    return {"ok": True}


@router.get("/v1/node")
async def get_node(asked: Asking) -> NodeView:
    return await asked.backend.node(asked.caller)


@router.get("/v1/node/disk")
async def get_disk_use(asked: Asking) -> DiskUse:
    return await asked.backend.disk_use(asked.caller)


@router.post("/v1/node/prune")
async def prune(asked: Asking) -> Pruned:
    """Removes what is kept of the caller's ended sandboxes."""
    return await asked.backend.prune(asked.caller)
