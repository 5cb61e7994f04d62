"""The way out of one sandbox: what it tried, and letting it reach one more host for a while."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final, Literal

from cloche.client._async.node import path_part
from cloche.client._async.transport import STREAM_SILENCE_S, AsyncTransport, Lost
from cloche.client._egress_events import RecordReader
from cloche.client._requests import request_body
from cloche.wire.egress import Asked, EgressRecord, EgressRecords, Explanation, Grant, GrantList, GrantView
from cloche.wire.errors import error
from cloche.wire.ids import short

PAGE: Final = 1000
_EVENTS: Final = {"accept": "text/event-stream"}


class AsyncEgress:
    """Of one sandbox. Nothing inside can call this."""

    def __init__(self, transport: AsyncTransport, sandbox: str) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self._path = f"/v1/sandboxes/{sandbox}/egress"

    async def records(self, *, after: int = 0, limit: int | None = None) -> builtins.list[EgressRecord]:
        """Every attempt, allowed or not, oldest first. `after`: only those with a higher number."""
        found: list[EgressRecord] = []
        while limit is None or len(found) < limit:
            query = {"after": after, "limit": PAGE if limit is None else min(PAGE, limit - len(found))}
            answer = await self._transport.request("GET", self._path, query=query)
            page = EgressRecords.model_validate_json(answer.body).records
            found += page
            if not page:
                break
            after = page[-1].seq
        return found

    async def follow(self, *, after: int = 0) -> AsyncIterator[EgressRecord]:
        """Records as they come, until the sandbox has ended. A lost connection is made again and goes on from there."""
        patience = self._transport.patience()
        reader = RecordReader(after)
        while True:
            try:
                async with aclosing(self._connection(reader)) as records:
                    async for record in records:
                        patience.progressed()
                        yield record
                if reader.ended:
                    return
                raise Lost(error("node_unavailable", "The stream ended before the sandbox."), unsent=False)
            except Lost as lost:
                reader.reconnected()
                await asyncio.sleep(patience.delay_s(lost.failure))

    async def _connection(self, reader: RecordReader) -> AsyncGenerator[EgressRecord, None]:
        query = {"after": reader.after, "follow": True}
        opened = self._transport.stream("GET", self._path, query=query, headers=_EVENTS, timeout_s=STREAM_SILENCE_S)
        async with opened as answer:
            async for part in answer.parts:
                for record in reader.feed(part):
                    yield record

    async def allow(
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
        return await self.grant(rule, for_s=for_s)

    async def grant(self, rule: Asked, *, for_s: float = 600) -> GrantView:
        body = request_body(Grant, rule=rule, for_s=for_s)
        answer = await self._transport.request("POST", f"{self._path}/grants", content=body)
        return GrantView.model_validate_json(answer.body)

    async def grants(self) -> builtins.list[GrantView]:
        answer = await self._transport.request("GET", f"{self._path}/grants")
        return GrantList.model_validate_json(answer.body).grants

    async def revoke(self, grant: str) -> None:
        """Takes a grant back; connections that it let out are cut."""
        if not grant:
            raise error("invalid_request", "A grant's id must not be empty.")
        await self._transport.request("DELETE", f"{self._path}/grants/{path_part(grant)}")

    async def explain(self, target: str, *, method: str | None = None) -> Explanation:
        """What its policy says of `HOST:PORT` or a URL, by which rule. Nothing is dialled."""
        query = {"target": target, "method": method}
        answer = await self._transport.request("GET", f"{self._path}/explain", query=query)
        return Explanation.model_validate_json(answer.body)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {short(self._sandbox)}>"
