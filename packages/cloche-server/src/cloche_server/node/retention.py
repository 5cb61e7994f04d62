"""What is kept of sandboxes that ended, for how long, and what is left that should not be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche.wire.nodes import Pruned
from cloche_server.node.context import Context
from cloche_server.node.lifecycle import Why
from cloche_server.node.records import SandboxRecord
from cloche_server.node.roster import Roster
from cloche_server.node.sandbox import Sandbox

LINGER_S: Final = 10.0
"""With `retain_s` 0: a sandbox that ended by itself stays this long, for whoever is just reading how."""
SWEEP_S: Final = 60.0


class Retention:
    """Removes what is due; keeps the figure that admission asks for."""

    def __init__(self, context: Context, roster: Roster) -> None:
        self._context = context
        self._roster = roster
        self.log_bytes = 0

    def sandbox_ended(self, sandbox: Sandbox) -> None:
        """Called once for each, right after its end is journalled."""
        record, cause = sandbox.record, sandbox.cause
        undone = cause is not None and cause.why is Why.CREATE_FAILED
        if undone or (record.retain_s == 0 and cause is not None and cause.why is Why.KILLED):
            self._remove(record.id)
            return
        self._roster.add_ended(record)
        if record.retain_s == 0:
            self._context.agenda.after(LINGER_S, lambda: self._remove_if_there(record.id))

    def sweep(self) -> None:
        """Every minute, for the whole node. Wall time is what a retention is about: it outlives a boot."""
        now = self._context.clock.wall_s()
        for record in list(self._roster.ended.values()):
            if is_due(record, now):
                self._remove(record.id)
        for sandbox in self._roster.live.values():
            self._sweep_commands(sandbox, now)
        self._context.agenda.after(SWEEP_S, self.sweep)

    def _sweep_commands(self, sandbox: Sandbox, now: float) -> None:
        store = self._context.store
        if now < sandbox.record.created_at + sandbox.record.retain_s:
            return  # none of its commands can be due
        for command in store.commands(sandbox.id):
            if command in sandbox.running or command in sandbox.recent:
                continue
            record = store.command(sandbox.id, command)
            if record is not None and record.ended_at is not None and now >= record.ended_at + sandbox.record.retain_s:
                store.remove_command(sandbox.id, command)

    def prune(self, records: list[SandboxRecord]) -> Pruned:
        freed = sum(self._remove(record.id) for record in records)
        return Pruned(sandboxes=len(records), bytes=freed)

    def _remove_if_there(self, sandbox: str) -> None:
        if sandbox in self._roster.ended:
            self._remove(sandbox)

    def _remove(self, sandbox: str) -> int:
        self._roster.forget(sandbox)
        return self._context.store.remove_sandbox(sandbox)


def is_due(record: SandboxRecord, now: float) -> bool:
    return record.ended_at is not None and now >= record.ended_at + max(record.retain_s, LINGER_S)


@dataclass(frozen=True)
class Leaks:
    """What is there and should not be, by kind; empty is right."""

    directories: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.directories or self.cgroups or self.engines)


def leaks(*, directories: set[str], known: set[str], cgroups: set[str], engines: set[str], live: set[str]) -> Leaks:
    """Pure: what each place holds beyond what should be there."""
    return Leaks(
        directories=tuple(sorted(directories - known)),
        cgroups=tuple(sorted(cgroups - live)),
        engines=tuple(sorted(engines - live)),
    )


def cgroups_below(directory: Path) -> set[str]:
    """The sandboxes that have a cgroup there."""
    if not directory.is_dir():
        return set()
    return {
        entry.name
        for entry in os.scandir(directory)
        if entry.is_dir() and entry.name.startswith("s") and len(entry.name) == 20
    }
