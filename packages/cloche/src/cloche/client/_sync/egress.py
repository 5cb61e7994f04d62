# Made by tools/unasync.py from packages/cloche/src/cloche/client/_async/egress.py: edit that one.
"""The way out of one sandbox: what it tried, and letting it reach one more host for a while."""

from __future__ import annotations

import builtins
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any, Final, Literal

from cloche.client._egress_events import RecordReader
from cloche.client._requests import request_body
from cloche.client._sync.node import path_part
from cloche.client._sync.transport import STREAM_SILENCE_S, Lost, Transport
from cloche.wire.egress import Asked, EgressRecord, EgressRecords, Explanation, Grant, GrantList, GrantView
from cloche.wire.errors import error
from cloche.wire.ids import short

PAGE: Final = 1000
_EVENTS: Final = {"accept": "text/event-stream"}


class Egress:
    """Of one sandbox. Nothing inside can call this."""

    def __init__(self, transport: Transport, sandbox: str) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self._path = f"/v1/sandboxes/{sandbox}/egress"

    def records(self, *, after: int = 0, limit: int | None = None) -> builtins.list[EgressRecord]:
        """Every attempt, allowed or not, oldest first. `after`: only those with a higher number."""
        found: list[EgressRecord] = []
        while limit is None or len(found) < limit:
            query = {"after": after, "limit": PAGE if limit is None else min(PAGE, limit - len(found))}
            answer = self._transport.request("GET", self._path, query=query)
            page = EgressRecords.model_validate_json(answer.body).records
            found += page
            if not page:
                break
            after = page[-1].seq
        return found

    def follow(self, *, after: int = 0) -> Iterator[EgressRecord]:
        """Records as they come, until the sandbox has ended. A lost connection is made again and goes on from there."""
        patience = self._transport.patience()
        reader = RecordReader(after)
        while True:
            try:
                with closing(self._connection(reader)) as records:
                    for record in records:
                        patience.progressed()
                        yield record
                if reader.ended:
                    return
                raise Lost(error("node_unavailable", "The stream ended before the sandbox."), unsent=False)
            except Lost as lost:
                reader.reconnected()
                time.sleep(patience.delay_s(lost.failure))

    def _connection(self, reader: RecordReader) -> Generator[EgressRecord, None, None]:
        query = {"after": reader.after, "follow": True}
        opened = self._transport.stream("GET", self._path, query=query, headers=_EVENTS, timeout_s=STREAM_SILENCE_S)
        with opened as answer:
            for part in answer.parts:
                yield from reader.feed(part)

    def allow(
        self,
        host: str,
        *,
        for_s: float = 600,
        effect: Literal["allow", "ask"] = "allow",
        ports: builtins.list[int] | None = None,
        methods: builtins.list[str] | None = None,
        paths: builtins.list[str] | None = None,
    ) -> GrantView:
        """Lets it reach this host (`HOST`, `HOST:PORT`, `preset:NAME`), for so long. The organisation's denials still hold."""
        rule: Asked = host
        more = {"ports": ports, "methods": methods, "paths": paths}
        if effect != "allow" or any(value is not None for value in more.values()):
            fields: dict[str, Any] = {name: value for name, value in more.items() if value is not None}
            rule = {"effect": effect, "host": host, **fields}  # type: ignore[assignment]
        return self.grant(rule, for_s=for_s)

    def grant(self, rule: Asked, *, for_s: float = 600) -> GrantView:
        body = request_body(Grant, rule=rule, for_s=for_s)
        answer = self._transport.request("POST", f"{self._path}/grants", content=body)
        return GrantView.model_validate_json(answer.body)

    def grants(self) -> builtins.list[GrantView]:
        answer = self._transport.request("GET", f"{self._path}/grants")
        return GrantList.model_validate_json(answer.body).grants

    def revoke(self, grant: str) -> None:
        """Takes a grant back; connections that it let out are cut."""
        if not grant:
            raise error("invalid_request", "A grant's id must not be empty.")
        self._transport.request("DELETE", f"{self._path}/grants/{path_part(grant)}")

    def explain(self, target: str, *, method: str | None = None) -> Explanation:
        """What its policy says of `HOST:PORT` or a URL, by which rule. Nothing is dialled."""
        query = {"target": target, "method": method}
        answer = self._transport.request("GET", f"{self._path}/explain", query=query)
        return Explanation.model_validate_json(answer.body)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {short(self._sandbox)}>"
