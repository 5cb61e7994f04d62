"""The way out, for `MemoryBackend`: records that a test puts in, grants that only count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from cloche.wire.egress import EgressRecord, EgressRecords, EgressRule, Explanation, Grant, GrantView
from cloche.wire.errors import error
from cloche.wire.ids import new_id
from cloche.wire.sandboxes import Sandbox
from cloche_server.api.backend import Caller


class MemoryEgress:
    """The egress half of `Backend`."""

    def __init__(self) -> None:
        super().__init__()
        self.egress: dict[str, list[EgressRecord]] = {}
        self.granted: dict[str, dict[str, GrantView]] = {}

    def _own(self, caller: Caller, name: str) -> Sandbox:
        raise NotImplementedError

    def attempt(self, sandbox: str, host: str, verdict: str = "denied", code: str = "no_rule") -> EgressRecord:
        """For tests: something inside tried to get out."""
        found = self.egress.setdefault(sandbox, [])
        record = EgressRecord.model_validate(
            {
                "seq": len(found) + 1,
                "at": 1_800_000_000.0,
                "sandbox": sandbox,
                "verdict": verdict,
                "code": code,
                "rule": "default",
                "host": host,
                "port": 443,
                "connection": len(found) + 1,
            }
        )
        found.append(record)
        return record

    async def egress_records(self, caller: Caller, sandbox: str, *, after: int, limit: int) -> EgressRecords:
        found = self.egress.get(self._own(caller, sandbox).id, [])
        return EgressRecords(records=[each for each in found if each.seq > after][:limit])

    async def follow_egress(self, caller: Caller, sandbox: str, *, after: int) -> AsyncIterator[EgressRecord]:
        box = self._own(caller, sandbox)
        while True:
            for each in self.egress.get(box.id, [])[after:]:
                yield each
                after = each.seq
            if self._own(caller, box.id).ended is not None:
                return
            await asyncio.sleep(0.005)  # a test's own thread adds to it

    async def grant_egress(self, caller: Caller, sandbox: str, request: Grant) -> GrantView:
        box = self._own(caller, sandbox)
        rule = EgressRule(host=request.rule) if isinstance(request.rule, str) else request.rule
        view = GrantView(id=new_id("grant"), rule=rule, ends_in_s=request.for_s)
        self.granted.setdefault(box.id, {})[view.id] = view
        return view

    async def list_grants(self, caller: Caller, sandbox: str) -> list[GrantView]:
        return list(self.granted.get(self._own(caller, sandbox).id, {}).values())

    async def revoke_grant(self, caller: Caller, sandbox: str, grant: str) -> list[GrantView]:
        if self.granted.get(self._own(caller, sandbox).id, {}).pop(grant, None) is None:
            raise error("grant_not_found", f"There is no grant {grant!r}.")
        return await self.list_grants(caller, sandbox)

    async def explain_egress(self, caller: Caller, sandbox: str, *, target: str, method: str | None) -> Explanation:
        self._own(caller, sandbox)
        return Explanation(
            effect="deny",
            rule="default",
            code="no_rule",
            text=f"deny   no rule allows {target}\nrule   default",
            policy="",
        )
