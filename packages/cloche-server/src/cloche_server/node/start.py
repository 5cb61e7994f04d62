"""A daemon's start: replay the journal, tidy the store, adopt what lives, end what does not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from cloche_server import points
from cloche_server.engines.contract import Engine
from cloche_server.node.adoption import PastCommand, PastSandbox, Replay, adopt, restore, take_up
from cloche_server.node.command import RunningCommand
from cloche_server.node.context import Context
from cloche_server.node.lifecycle import Cause, Life, Why
from cloche_server.node.records import SandboxRecord
from cloche_server.node.retention import Retention
from cloche_server.node.roster import Roster
from cloche_server.node.sandbox import Sandbox

ADOPT_AT_ONCE: Final = 16
TURN_S: Final = 0.25
"""An adoption that takes longer goes on without its turn: silent guests do not keep honest ones waiting."""
ADOPT_S: Final = 0.5
"""A start waits this long for adoptions; then the node serves, and the rest goes on beside it."""
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
    restored = [_restored(context, roster, retention, *each) for each in _tidy(context, roster, replay)]
    context.journal.write("node.started", detail=detail)
    points.reached("node.start.after_journal")
    for past in replay.living.values():  # journalled, and its directory is gone: somebody removed it
        lost = {"reason": "host_failure", "detail": "its directory is gone"}
        context.journal.write("sandbox.ended", sandbox=past.id, detail=lost)
    turns = Turns()
    adoptions = []
    for sandbox, commands in restored:
        take_up(sandbox)
        engine, same_boot = engines.get(sandbox.record.engine), sandbox.record.boot_id == boot_id
        adoption = _adopt(context, sandbox, commands, turns, engine, same_boot=same_boot)
        sandbox.adoption = context.spawn(adoption, f"adopt {sandbox.id}")
        adoptions.append(sandbox.adoption)
    if adoptions:
        await asyncio.wait(adoptions, timeout=ADOPT_S)
    retention.sweep()
    count_logs(context, retention)


async def late(roster: Roster) -> set[str]:
    """Waits for the adoptions that outlast the start; whose they were."""
    found = {each.id: each.adoption for each in roster.live.values() if each.adoption is not None}
    under_way = {name: adoption for name, adoption in found.items() if not adoption.done()}
    if under_way:
        await asyncio.wait(under_way.values())
    return set(under_way)


async def stop(roster: Roster) -> None:
    """Adoptions that are still under way are given up: the next daemon begins them anew."""
    found = [each.adoption for each in roster.live.values() if each.adoption is not None and each.cause is None]
    for adoption in found:
        adoption.cancel()
    if found:
        await asyncio.wait(found)


def _restored(
    context: Context, roster: Roster, retention: Retention, record: SandboxRecord, past: PastSandbox
) -> tuple[Sandbox, list[RunningCommand] | Exception]:
    """In the roster before the first line is written: that line may begin a new file, which restates the roster."""
    if past.ttl_deadline_ns is not None:
        record.ttl_deadline_ns = past.ttl_deadline_ns
    life = Life(record.created_ns, record.ttl_deadline_ns, record.idle_timeout_s)
    sandbox = Sandbox(context, record, life, retention.sandbox_ended)
    roster.add(sandbox)
    try:
        return sandbox, restore(context, sandbox, past)
    except Exception as bad:  # a defect of ours costs that sandbox (`_adopt`), never the start
        return sandbox, bad


async def _adopt(
    context: Context,
    sandbox: Sandbox,
    commands: list[RunningCommand] | Exception,
    turns: Turns,
    engine: Engine | None,
    *,
    same_boot: bool,
) -> None:
    """A defect of ours in adopting one sandbox costs that one, never the start."""
    if isinstance(commands, Exception):
        _end_broken(context, sandbox, commands)
        commands = []  # what is alive of it is still found, and ended
    try:
        async with turns.one():
            await adopt(context, sandbox, commands, engine, same_boot=same_boot)
    except Exception as bad:  # the same
        _end_broken(context, sandbox, bad)


def _end_broken(context: Context, sandbox: Sandbox, bad: Exception) -> None:
    context.log.error("adoption failed", sandbox=sandbox.id, exc_info=bad)
    sandbox.end(Cause(Why.HOST, detail=f"it could not be adopted ({type(bad).__name__})"))


class Turns:
    """So many at once, but for a bounded time each."""

    def __init__(self, at_once: int = ADOPT_AT_ONCE, turn_s: float = TURN_S) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._turn_s = turn_s

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        await self._free.acquire()
        held = [self._free]

        def pass_on() -> None:
            if held:
                held.pop().release()

        timer = asyncio.get_running_loop().call_later(self._turn_s, pass_on)
        try:
            yield
        finally:
            timer.cancel()
            pass_on()


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
