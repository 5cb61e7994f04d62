"""Approvals: what waits, and an answer to it; by who is known, or by whoever a webhook gave a token."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Path, Query, Request

from cloche.wire.approvals import Answer, Approval, ApprovalList
from cloche_server.api.asking import Asking
from cloche_server.api.backend import Backend

router = APIRouter(prefix="/v1/approvals", tags=["approvals"])

TOKEN_PATH: Final = "/v1/approvals/answers/"
"""The one prefix without a caller: the token in it says more than a key would."""
WAIT_S_MAX: Final = 60.0

Name = Annotated[str, Path(description="A question's id, or a unique prefix of it.", max_length=64)]
Token = Annotated[str, Path(description="From a webhook's message.", pattern=r"^[A-Za-z0-9_-]{20,128}$")]


@router.get("")
async def list_approvals(
    asked: Asking,
    after: Annotated[
        int | None, Query(description="A cursor of an earlier answer: wait for a change.", ge=0, le=2**62)
    ] = None,
    wait_s: Annotated[float, Query(description="With `after`: how long, at most.", ge=0, le=WAIT_S_MAX)] = 0.0,
    include_over: Annotated[
        bool, Query(alias="all", description="Those that are over too, while they are kept.")
    ] = False,
) -> ApprovalList:
    """What waits for an answer."""
    return await asked.backend.list_approvals(asked.caller, after=after, wait_s=wait_s, include_over=include_over)


@router.post("/answers/{token}")
async def answer_by_token(request: Request, body: Answer, token: Token) -> Approval:
    """For whoever was told by the webhook. Once, and only while the question waits."""
    backend: Backend = request.app.backend
    return await backend.answer_by_token(token, body)


@router.post("/{approval}")
async def answer_approval(asked: Asking, body: Answer, approval: Name) -> Approval:
    return await asked.backend.answer_approval(asked.caller, approval, body)
