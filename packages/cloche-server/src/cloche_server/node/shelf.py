"""Commands of a sandbox, running or only on disk, by id or unique prefix; and their output."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from cloche.wire.commands import Command, Cursor
from cloche.wire.errors import error
from cloche.wire.ids import is_id, matches_prefix
from cloche_server.api.backend import OutputChunk
from cloche_server.node.command import RunningCommand
from cloche_server.node.command_log import CommandLog
from cloche_server.node.records import CommandRecord, SandboxRecord, ended_command_view
from cloche_server.node.sandbox import Sandbox
from cloche_server.node.store import Store

AnyCommand = RunningCommand | CommandRecord


def view(command: AnyCommand) -> Command:
    return ended_command_view(command) if isinstance(command, CommandRecord) else command.view()


def find(store: Store, sandbox: Sandbox | SandboxRecord, text: str) -> AnyCommand:
    """Raises not_found, ambiguous."""
    if is_id(text, "command"):
        found = _get(store, sandbox, text)
        if found is None:
            raise error("not_found", f"There is no command {text!r} in this sandbox.")
        return found
    names = [name for name in store.commands(sandbox.id) if matches_prefix(name, text)] if len(text) >= 2 else []
    if len(names) > 1:
        raise error("ambiguous", f"{len(names)} commands begin with {text[:80]!r}.", detail={"matches": names[:10]})
    command = _get(store, sandbox, names[0]) if names else None
    if command is None:
        raise error("not_found", f"There is no command {text[:80]!r} in this sandbox.")
    return command


def find_anywhere(store: Store, sandboxes: Iterable[Sandbox | SandboxRecord], text: str) -> AnyCommand:
    """Among all sandboxes of a caller."""
    found: list[AnyCommand] = []
    for sandbox in sandboxes:
        names = [
            name
            for name in store.commands(sandbox.id)
            if name == text or (len(text) >= 2 and matches_prefix(name, text))
        ]
        found += (each for name in names if (each := _get(store, sandbox, name)) is not None)
    if len(found) > 1:
        raise error("ambiguous", f"{len(found)} commands begin with {text[:80]!r}.")
    if not found:
        raise error("not_found", f"There is no command {text[:80]!r}.")
    return found[0]


def _get(store: Store, sandbox: Sandbox | SandboxRecord, command: str) -> AnyCommand | None:
    if (
        isinstance(sandbox, Sandbox)
        and (here := sandbox.running.get(command) or sandbox.recent.get(command)) is not None
    ):
        return here
    return store.command(sandbox.id, command)


def all_of(store: Store, sandbox: Sandbox | SandboxRecord) -> list[Command]:
    """Oldest first."""
    found = (_get(store, sandbox, name) for name in store.commands(sandbox.id))
    return sorted((view(each) for each in found if each is not None), key=lambda each: each.created_at)


def open_log(store: Store, command: AnyCommand) -> CommandLog:
    if isinstance(command, RunningCommand):
        return command.log
    request = command.request
    log = CommandLog.recover(
        store.command_dir(command.sandbox, command.id),
        bytes_max=request["output_bytes_max"],
        on_full=request["on_full"],
    )
    log.complete = True
    return log


async def read(log: CommandLog, start: Cursor, *, follow: bool, fd: int | None) -> AsyncIterator[OutputChunk]:
    """From `start` to what is there, or on to the end of the output."""
    with log.reader(start, fd=fd, follows=follow) as reader:
        while True:
            found = reader.read()
            if found is None:
                if log.complete or not follow:
                    return
                await log.changed()
                continue
            offset, from_fd, data = found
            if data:
                yield OutputChunk(log.generation, offset, from_fd, data)
            else:
                await asyncio.sleep(0)
