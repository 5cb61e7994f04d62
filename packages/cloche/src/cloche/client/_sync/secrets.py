# Made by tools/unasync.py from packages/cloche/src/cloche/client/_async/secrets.py: edit that one.
"""Secrets: what the operator binds. A value is sent and never read back."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from typing import Any

from cloche.client._requests import read_model
from cloche.client._secret_body import check_line, name_part, secret_body
from cloche.client._sync.transport import Transport
from cloche.wire.secrets import Place, SecretList, SecretView

_PATH = "/v1/secrets"


class Secrets:
    """The secrets of a node that you may see."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> builtins.list[SecretView]:
        return read_model(SecretList, (self._transport.request("GET", _PATH)).body).secrets

    def set(
        self,
        name: str,
        value: str | None = None,
        *,
        source: Mapping[str, Any] | None = None,
        hosts: Sequence[str],
        places: Sequence[Place | Mapping[str, Any]],
        methods: Sequence[str] | None = None,
        paths: Sequence[str] | None = None,
        require: bool = False,
    ) -> SecretView:
        """`value`, or a `source` that the node asks (fields of `wire.secrets.Source`; for the node's operator).

        In its place if there is one of that name: sandboxes that hold it go on with the new value.
        """
        check_line(self._transport.target)
        body = secret_body(value, source, hosts=hosts, places=places, methods=methods, paths=paths, require=require)
        answer = self._transport.request("PUT", f"{_PATH}/{name_part(name)}", content=body)
        return read_model(SecretView, answer.body)

    def remove(self, name: str) -> SecretView:
        """Sandboxes that hold it lose it at once. Answers what it was."""
        answer = self._transport.request("DELETE", f"{_PATH}/{name_part(name)}", may_repeat=False)
        return read_model(SecretView, answer.body)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._transport.target}>"
