"""The part of a Backend that keeps secrets. Values go in by `set_secret` and never come out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cloche.wire.secrets import SecretView, SetSecret

if TYPE_CHECKING:
    from cloche_server.api.backend import Caller

SecretViews = list[SecretView]


class SecretsBackend(Protocol):
    """What can be asked about secrets."""

    async def set_secret(self, caller: Caller, name: str, request: SetSecret) -> SecretView: ...

    async def list_secrets(self, caller: Caller) -> SecretViews: ...

    async def remove_secret(self, caller: Caller, name: str) -> SecretView:
        """Answers what it was."""
        ...
