"""Secrets: set, list, remove. No route answers with a value."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request

from cloche.wire.secrets import SecretList, SecretView, SetSecret
from cloche_server.api.asking import JSON_BYTES_MAX, Asking, bounded, json_body

router = APIRouter(prefix="/v1/secrets", tags=["secrets"])

Name = Annotated[
    str,
    Path(
        description="The name that a sandbox asks for; inside, a variable.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        max_length=128,
    ),
]
_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/SetSecret"}}},
    }
}


@router.get("")
async def list_secrets(asked: Asking) -> SecretList:
    """The caller's own; an administrator sees all."""
    return SecretList(secrets=await asked.backend.list_secrets(asked.caller))


@router.put("/{name}", openapi_extra=_BODY)
async def set_secret(asked: Asking, request: Request, name: Name) -> SecretView:
    """New, or in the place of the one before: sandboxes that hold it go on with the new value."""
    whole = Request(request.scope, bounded(request.receive, JSON_BYTES_MAX))  # a PUT is not bounded by the gate
    return await asked.backend.set_secret(asked.caller, name, await json_body(whole, SetSecret))


@router.delete("/{name}")
async def remove_secret(asked: Asking, name: Name) -> SecretView:
    """Sandboxes that hold it lose it at once. Answers what it was."""
    return await asked.backend.remove_secret(asked.caller, name)
