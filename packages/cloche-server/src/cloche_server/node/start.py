"""A daemon's start: replay the journal, tidy the store, adopt what lives, end what does not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

from cloche_server.engines.contract import Engine
from cloche_server.node.adoption import PastCommand, PastSandbox, Replay, adopt
from cloche_server.node.context import Context
from cloche_server.node.lifecycle import Cause, Life, Why
from cloche_server.node.records import SandboxRecord
from cloche_server.node.retention import Retention
from cloche_server.node.roster import Roster
from cloche_server.node.sandbox import Sandbox

ADOPT_AT_ONCE: Final = 16
LOG_BYTES_S: Final = 60.0


async def start(
    context: Context, roster: Roster, retention: Retention, engines: Mapping[str, Engine], boot_id: str
) -> None:
    replay = Replay(context.journal.lines)
    context.journal.lines.clear()
    detail = {
        "boot_id": boot_id,
        "pid": os.getpid(),
        "generation": context.store.generation,
        "living": len(replay.living),
    }
    context.journal.write("node.started", detail=detail)
    living = _tidy(context, roster, replay)
    gate = asyncio.Semaphore(ADOPT_AT_ONCE)

    async def one(record: SandboxRecord, past: PastSandbox) -> None:
        if past.ttl_deadline_ns is not None:
            record.ttl_deadline_ns = past.ttl_deadline_ns
        life = Life(record.created_ns, record.ttl_deadline_ns, record.idle_timeout_s)
        sandbox = Sandbox(context, record, life, retention.sandbox_ended)
        roster.add(sandbox)
        async with gate:
            await adopt(context, sandbox, past, engines.get(record.engine), same_boot=record.boot_id == boot_id)

    results = await asyncio.gather(*(one(record, past) for record, past in living), return_exceptions=True)
    for (record, _), bad in zip(living, results, strict=True):
        if bad is not None:
            _end_broken(context, roster, record, bad)
    retention.sweep()
    count_logs(context, retention)


def _end_broken(context: Context, roster: Roster, record: SandboxRecord, bad: BaseException) -> None:
    """A defect of ours in adopting one sandbox costs that one, never the start."""
    context.log.error("adoption failed", sandbox=record.id, exc_info=bad)
    roster.live[record.id].end(Cause(Why.HOST, detail=f"it could not be adopted ({type(bad).__name__})"))


def _tidy(context: Context, roster: Roster, replay: Replay) -> list[tuple[SandboxRecord, PastSandbox]]:
    """Finishes writes that the last daemon did not, removes what was never journalled; who is to be adopted."""
    living = []
    for name in context.store.sandboxes():
        record = context.store.sandbox(name)
        past = replay.living.pop(name, None)
        if record is not None and past is not None:
            living.append((record, past))
        elif record is not None and (record.end or name in replay.ended):
            roster.add_ended(_with_end(context, record, replay.ended.get(name)))
        else:
            context.store.remove_sandbox(name)
    for command, (sandbox, end) in replay.ended_commands.items():
        found = context.store.command(sandbox, command)
        if found is not None and found.end is None:
            found.end, found.ended_at, found.ended_ns = end, end.get("at"), found.created_ns
            context.store.save_command(found)
    for _, each in living:
        _remove_unjournalled(context, replay, each)
    for past in replay.living.values():  # journalled, and its directory is gone: somebody removed it
        context.journal.write(
            "sandbox.ended", sandbox=past.id, detail={"reason": "host_failure", "detail": "its directory is gone"}
        )
    return living


def _remove_unjournalled(context: Context, replay: Replay, past: PastSandbox) -> None:
    """Commands that were written down and not journalled: they never ran, and a repeat of their key starts them."""
    for name in context.store.commands(past.id):
        if name in past.commands or name in replay.ended_commands:
            continue
        record = context.store.command(past.id, name)
        if record is None or record.end is None:
            context.store.remove_command(past.id, name)


def _with_end(context: Context, record: SandboxRecord, end: dict[str, Any] | None) -> SandboxRecord:
    if not record.end and end is not None:
        record.end = {name: value for name, value in end.items() if name != "oom_kills"}
        record.ended_at = end.get("at") or context.clock.wall_s()
        context.store.save_sandbox(record)
    return record


def count_logs(context: Context, retention: Retention) -> None:
    """The bytes that logs take, counted now and then in a thread: admission needs it at once."""

    async def count() -> None:
        retention.log_bytes = await asyncio.to_thread(context.store.log_bytes)
        context.agenda.after(LOG_BYTES_S, lambda: count_logs(context, retention))

    context.spawn(count(), "count logs")


def carried(roster: Roster) -> Iterator[dict[str, Any]]:
    """Each living sandbox restated, for the beginning of a new journal file."""
    for sandbox in roster.live.values():
        if sandbox.ended.done():
            continue
        past = PastSandbox(sandbox.id, sandbox.was_ready, sandbox.cause, sandbox.life.ttl_deadline_ns)
        for command in sandbox.running.values():
            past.commands[command.id] = PastCommand(
                command.id, command.record.stream, command.cause, command.stdin.closed
            )
        yield past.carried(sandbox.record.owner, sandbox.record.tenant)
