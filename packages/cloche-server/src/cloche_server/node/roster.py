"""Who is here, and who may see whom: sandboxes by id, unique prefix, short form or name.

A caller sees his own; an administrator sees all. What a caller may not see does not exist for him.
"""

from __future__ import annotations

from collections.abc import Iterator

from cloche.wire.errors import ClocheError, error
from cloche.wire.ids import matches_prefix
from cloche_server.api.backend import Caller
from cloche_server.node.records import SandboxRecord
from cloche_server.node.sandbox import Sandbox

PREFIX_CHARS_MIN = 2


def may_see(caller: Caller, owner: str | None, tenant: str | None) -> bool:
    return caller.is_admin or (caller.owner == owner and caller.tenant == tenant)


class Roster:
    """Live sandboxes, and the records of those that ended and are kept."""

    def __init__(self) -> None:
        self.live: dict[str, Sandbox] = {}
        self.ended: dict[str, SandboxRecord] = {}
        self._keys: dict[tuple[str, str, str], str] = {}

    # --- changes ------------------------------------------------------------------------------------

    def add(self, sandbox: Sandbox) -> None:
        self.live[sandbox.id] = sandbox
        self._remember_key(sandbox.record)

    def add_ended(self, record: SandboxRecord) -> None:
        self.live.pop(record.id, None)
        self.ended[record.id] = record
        self._remember_key(record)

    def forget(self, sandbox: str) -> None:
        live, ended = self.live.pop(sandbox, None), self.ended.pop(sandbox, None)
        record = live.record if live is not None else ended
        if record is not None and record.key is not None:
            self._keys.pop((record.tenant, record.owner, record.key), None)

    def _remember_key(self, record: SandboxRecord) -> None:
        if record.key is not None:
            self._keys[record.tenant, record.owner, record.key] = record.id

    # --- finding ------------------------------------------------------------------------------------

    def by_key(self, caller: Caller, key: str) -> Sandbox | SandboxRecord | None:
        known = self._keys.get((caller.tenant, caller.owner, key))
        return None if known is None else self.live.get(known) or self.ended.get(known)

    def check_name(self, caller: Caller, name: str) -> None:
        for sandbox in self.live.values():
            same_owner = (sandbox.record.tenant, sandbox.record.owner) == (caller.tenant, caller.owner)
            if sandbox.record.name == name and same_owner:
                raise error(
                    "name_taken", f"You have a sandbox named {name!r} ({sandbox.id}).", detail={"sandbox": sandbox.id}
                )

    def find(self, caller: Caller, text: str) -> Sandbox | SandboxRecord:
        """A whole id or a live name first, then a prefix, then the name of one that ended (the latest)."""
        exact = self.live.get(text) or self.ended.get(text)
        if exact is not None:
            if not may_see(caller, _record(exact).owner, _record(exact).tenant):
                raise missing(text)
            return exact
        for sandbox in self.live.values():
            if sandbox.record.name == text and may_see(caller, sandbox.record.owner, sandbox.record.tenant):
                return sandbox
        found = (
            [each for each in self.visible(caller) if matches_prefix(_record(each).id, text)]
            if len(text) >= PREFIX_CHARS_MIN
            else []
        )
        if len(found) > 1:
            ids = [_record(each).id for each in found[:10]]
            raise error("ambiguous", f"{len(found)} sandboxes begin with {text!r}.", detail={"matches": ids})
        if found:
            return found[0]
        named = [
            record
            for record in self.ended.values()
            if record.name == text and may_see(caller, record.owner, record.tenant)
        ]
        if not named:
            raise missing(text)
        return max(named, key=lambda record: record.ended_at or 0.0)

    def visible(self, caller: Caller, *, ended: bool = True) -> Iterator[Sandbox | SandboxRecord]:
        both: list[Sandbox | SandboxRecord] = [*self.live.values(), *(self.ended.values() if ended else ())]
        return (each for each in both if may_see(caller, _record(each).owner, _record(each).tenant))


def _record(each: Sandbox | SandboxRecord) -> SandboxRecord:
    return each if isinstance(each, SandboxRecord) else each.record


def missing(text: str) -> ClocheError:
    return error("not_found", f"There is no sandbox {text[:80]!r}.")
