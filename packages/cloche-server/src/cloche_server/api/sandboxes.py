"""Sandboxes: create, list, look, extend, end."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query

from cloche.wire.nodes import Killed
from cloche.wire.sandboxes import CreateSandbox, Extend, Sandbox, SandboxList
from cloche_server.api.asking import Asking, SandboxName, WaitSeconds, checked_key

router = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"])

Key = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="A repeat with the same key answers with the first one's sandbox.",
        min_length=1,
        max_length=128,
    ),
]


@router.post("", status_code=201)
async def create_sandbox(asked: Asking, body: CreateSandbox, key: Key = None) -> Sandbox:
    return await asked.backend.create(asked.caller, body, checked_key(key))


@router.get("")
async def list_sandboxes(
    asked: Asking,
    include_ended: Annotated[bool, Query(alias="all", description="Also those that have ended.")] = False,
    usage: Annotated[bool, Query(description="With what each uses.")] = False,
) -> SandboxList:
    return SandboxList(sandboxes=await asked.backend.list(asked.caller, include_ended=include_ended, usage=usage))


@router.delete("")
async def kill_all_sandboxes(asked: Asking) -> Killed:
    """All of the caller's."""
    return Killed(sandboxes=await asked.backend.kill_all(asked.caller))


@router.get("/{s}")
async def get_sandbox(asked: Asking, s: SandboxName, wait_s: WaitSeconds = None) -> Sandbox:
    if wait_s:
        return await asked.backend.wait_ended(asked.caller, s, wait_s)
    return await asked.backend.get(asked.caller, s)


@router.post("/{s}/extend")
async def extend_sandbox(asked: Asking, s: SandboxName, body: Extend) -> Sandbox:
    return await asked.backend.extend(asked.caller, s, body.ttl_s)


@router.delete("/{s}")
async def kill_sandbox(asked: Asking, s: SandboxName) -> Sandbox:
    """Answers when everything of it is gone."""
    return await asked.backend.kill(asked.caller, s)
