"""Secrets, as a Backend answers for them: the room `secrets/` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cloche.wire.secrets import SecretView, SetSecret
from cloche_server.api.backend import Caller
from cloche_server.node.context import Context
from cloche_server.secrets.service import Secrets

Views = list[SecretView]


class Secreting:
    """The secrets' part of `api.backend.Backend`."""

    secrets: Secrets
    """Opened when the node is made."""

    async def set_secret(self, caller: Caller, name: str, request: SetSecret) -> SecretView:
        return await self.secrets.set(caller, name, request)

    async def list_secrets(self, caller: Caller) -> Views:
        return await self.secrets.list(caller)

    async def remove_secret(self, caller: Caller, name: str) -> SecretView:
        return await self.secrets.remove(caller, name)


def open_secrets(context: Context, state_dir: Path, config_dir: Path) -> Secrets:
    """Each change is a line of the journal; no value is ever in one."""

    def told(kind: str, sandbox: str | None, owner: str, tenant: str, detail: dict[str, Any]) -> None:
        context.journal.write(kind, sandbox=sandbox, owner=owner, tenant=tenant, detail=detail)

    return Secrets(state_dir / "secrets", config_dir, spawn=context.spawn, told=told)
