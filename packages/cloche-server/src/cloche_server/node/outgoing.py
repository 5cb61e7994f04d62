"""The way out of sandboxes, as a Backend answers for it: records, grants, explanations. Only callers from outside come here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final
from urllib.parse import urlsplit

from cloche.wire.egress import EgressRecord, EgressRecords, Explanation, Grant, GrantView
from cloche.wire.errors import error
from cloche_server.api.backend import Caller
from cloche_server.egress.records import Records
from cloche_server.node.context import Context
from cloche_server.node.guest_text import escaped
from cloche_server.node.records import SandboxRecord
from cloche_server.node.roster import Roster
from cloche_server.node.sandbox import Sandbox
from cloche_server.node.way import RECORDS, Plan
from cloche_server.policy.model import HTTP_PORT, TLS_PORT, Target
from cloche_server.policy.names import host_and_port, target

Grants = list[GrantView]
PAGE: Final = 500
PORTS: Final = {"http": HTTP_PORT, "https": TLS_PORT, "ws": HTTP_PORT, "wss": TLS_PORT}


class Outgoing:
    """The egress half of `api.backend.Backend`."""

    context: Context
    roster: Roster

    def _live(self, caller: Caller, sandbox: str) -> Sandbox:
        """The node's: raises not_found, ambiguous, sandbox_ended."""
        raise NotImplementedError

    async def egress_records(self, caller: Caller, sandbox: str, *, after: int, limit: int) -> EgressRecords:
        found = self.roster.find(caller, sandbox)
        records = self._records(found)
        return EgressRecords(records=await asyncio.to_thread(records.read, after, limit))

    async def follow_egress(self, caller: Caller, sandbox: str, *, after: int) -> AsyncIterator[EgressRecord]:
        found = self.roster.find(caller, sandbox)
        records = self._records(found)
        while True:
            page = await asyncio.to_thread(records.read, after, PAGE)
            for record in page:
                yield record
                after = record.seq
            if page:
                continue
            if not isinstance(found, Sandbox) or found.ended.done():
                return
            await _news(records, found, after)

    async def grant_egress(self, caller: Caller, sandbox: str, request: Grant) -> GrantView:
        return await self._live(caller, sandbox).way.grant(caller.owner, request.rule, request.for_s)

    async def list_grants(self, caller: Caller, sandbox: str) -> Grants:
        return self._live(caller, sandbox).way.grants()

    async def revoke_grant(self, caller: Caller, sandbox: str, grant: str) -> Grants:
        way = self._live(caller, sandbox).way
        way.revoke(caller.owner, grant)
        return way.grants()

    async def explain_egress(self, caller: Caller, sandbox: str, *, target: str, method: str | None) -> Explanation:
        found = self.roster.find(caller, sandbox)
        if isinstance(found, Sandbox):
            policy = found.way.gate.policy
        elif found.egress is not None:
            policy = Plan.of_stored(found.egress).policy
        else:
            raise error("sandbox_ended", "Nothing is known any more of what it could reach.")
        where, path = parse_target(target)
        if path is None and method is None:
            decision = policy.connect(where)
            text = policy.explain(where)
        else:
            decision = policy.request(where, method or "GET", path or "/")
            text = policy.explain(where, method or "GET", path or "/")
        return Explanation(
            effect=decision.effect.value, rule=decision.rule, code=decision.code, text=text, policy=policy.digest
        )

    def _records(self, found: Sandbox | SandboxRecord) -> Records:
        if isinstance(found, Sandbox):
            return found.way.records
        return Records(self.context.store.sandbox_dir(found.id) / RECORDS, sandbox=found.id)


async def _news(records: Records, sandbox: Sandbox, after: int) -> None:
    """Until there is a record, or there will be none."""
    wait: asyncio.Future[Any] = asyncio.ensure_future(records.wait(after))
    ended: asyncio.Future[Any] = sandbox.ended
    try:
        await asyncio.wait([wait, ended], return_when=asyncio.FIRST_COMPLETED)
    finally:
        wait.cancel()


def parse_target(text: str) -> tuple[Target, str | None]:
    """`HOST`, `HOST:PORT` or a URL; the path only of a URL."""
    try:
        if "://" not in text:
            return target(*host_and_port(text, TLS_PORT)), None
        parts = urlsplit(text)
        if parts.scheme not in PORTS:
            raise ValueError("only http, https, ws and wss are known")
        host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname or ""
        return target(host, parts.port or PORTS[parts.scheme]), parts.path or "/"
    except ValueError as bad:
        raise error("invalid_request", f"{escaped(text, 120)!r}: {escaped(str(bad), 120)}") from bad
