"""What a new daemon does with the sandboxes of the last one: `Replay` folds the journal (pure), the rest acts on it.

A sandbox that lives is re-attached: its commands go on where their logs end, one that was journalled and never opened is
opened, a cause that was journalled is carried out. One that does not live gets its typed end. One that was being made is
undone: nobody was told of it.

`restore` and `take_up` come before the API is served and never wait: from then on a sandbox is seen as it stands by the
journal's word. `adopt` may outlast the start: a guest that is slow to answer RESET keeps nobody else waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from cloche.wire.sandboxes import SandboxState
from cloche_server import points
from cloche_server.channel import Channel, ChannelError, ProtocolError, StreamState
from cloche_server.engines.contract import Engine, EngineError, Instance, ProcessEnd
from cloche_server.node.command import RunningCommand
from cloche_server.node.command_log import CommandLog, LogBroken
from cloche_server.node.context import Context
from cloche_server.node.guest_text import escaped
from cloche_server.node.journal import Line
from cloche_server.node.lifecycle import Cause, Why
from cloche_server.node.log_reader import STDERR, STDOUT
from cloche_server.node.sandbox import Sandbox

STATE_S: Final = 10.0
"""A guest that does not answer RESET within this is taken for stuck: its sandbox ends as `unresponsive`."""
HALF_MADE: Final = Cause(Why.CREATE_FAILED, detail="the daemon died while it was being made")


@dataclass
class PastCommand:
    """A command that had not ended."""

    id: str
    stream: int
    cause: Cause | None = None
    stdin_closed: bool = False


@dataclass
class PastSandbox:
    """A sandbox that had not ended."""

    id: str
    running: bool = False
    cause: Cause | None = None
    ttl_deadline_ns: int | None = None
    commands: dict[str, PastCommand] = field(default_factory=dict)

    def carried(self, owner: str, tenant: str) -> dict[str, Any]:
        """The fields of the line that restates it in a new journal file."""
        detail = {
            "running": self.running,
            "cause": _plain(self.cause),
            "ttl_deadline_ns": self.ttl_deadline_ns,
            "commands": [[c.id, c.stream, _plain(c.cause), c.stdin_closed] for c in self.commands.values()],
        }
        return {"sandbox": self.id, "owner": owner, "tenant": tenant, "detail": detail}


class Replay:
    """The journal folded: which sandboxes had not ended, and how far each had come."""

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self.living: dict[str, PastSandbox] = {}
        self.ended: dict[str, dict[str, Any]] = {}
        self.ended_commands: dict[str, tuple[str, dict[str, Any]]] = {}
        """Of sandboxes that live: the daemon may have died before the command's record said so."""
        self.boot_id: str | None = None
        for line in lines:
            self.take(line)

    def take(self, line: Line) -> None:
        if line.kind == "node.started":
            self.boot_id = line.detail.get("boot_id")
        if line.sandbox is None:
            return
        if line.kind in ("sandbox.creating", "carried"):
            self.living[line.sandbox] = _past(line)
        past = self.living.get(line.sandbox)
        if past is None:
            return
        if line.kind.startswith("command.") and line.command is not None:
            self._command(past, line, line.command)
        elif line.kind == "sandbox.running":
            past.running = True
        elif line.kind == "sandbox.extended":
            past.ttl_deadline_ns = line.detail["ttl_deadline_ns"]
        elif line.kind == "sandbox.ending":
            past.cause = _cause(line.detail)
        elif line.kind == "sandbox.ended":
            del self.living[line.sandbox]
            self.ended[line.sandbox] = line.detail
            for command, (sandbox, _) in list(self.ended_commands.items()):
                if sandbox == line.sandbox:
                    del self.ended_commands[command]

    def _command(self, past: PastSandbox, line: Line, command: str) -> None:
        if line.kind == "command.starting":
            past.commands[command] = PastCommand(command, line.detail["stream"])
        elif line.kind == "command.ended":
            past.commands.pop(command, None)
            self.ended_commands[command] = (past.id, line.detail)
        elif command in past.commands:
            if line.kind == "command.ending":
                past.commands[command].cause = _cause(line.detail)
            elif line.kind == "command.stdin_closed":
                past.commands[command].stdin_closed = True


def _past(line: Line) -> PastSandbox:
    assert line.sandbox is not None
    if line.kind == "sandbox.creating":
        return PastSandbox(line.sandbox)
    detail = line.detail
    past = PastSandbox(line.sandbox, detail["running"], _cause(detail["cause"]), detail["ttl_deadline_ns"])
    for command, stream, cause, stdin_closed in detail["commands"]:
        past.commands[command] = PastCommand(command, stream, _cause(cause), stdin_closed)
    return past


def _cause(detail: dict[str, Any] | None) -> Cause | None:
    return Cause(Why(detail["why"]), detail.get("by"), detail.get("detail")) if detail else None


def _plain(cause: Cause | None) -> dict[str, Any] | None:
    return {"why": cause.why.value, "by": cause.by, "detail": cause.detail} if cause else None


# ------------------------------------------------------------------------------------------- acting


def restore(context: Context, sandbox: Sandbox, past: PastSandbox) -> list[RunningCommand]:
    """What the journal says of it. Writes no line: a new journal file restates who was restored, and nobody else."""
    sandbox.was_ready, sandbox.cause = past.running, past.cause
    return _commands(context, sandbox, past)


def take_up(sandbox: Sandbox) -> None:
    """It runs, or it goes on to its end. Whoever calls this sets `sandbox.adoption` in the same turn of the loop."""
    if sandbox.cause is not None:  # decided by the last daemon, and journalled then
        sandbox.carry_out(sandbox.cause)
    elif not sandbox.was_ready:  # whatever became of it: nobody was told that it exists
        sandbox.end(HALF_MADE)
    else:
        sandbox.runs()


async def adopt(
    context: Context, sandbox: Sandbox, commands: list[RunningCommand], engine: Engine | None, *, same_boot: bool
) -> None:
    """Finds what is alive of it, and its guest; or ends it. An end that was decided before or meanwhile stays the one."""
    if engine is None or not same_boot:
        detail = "the machine was started anew" if not same_boot else "its engine is gone"
        return sandbox.end(Cause(Why.HOST, detail=detail))
    try:
        instance = await engine.adopt(sandbox.record.spec())
    except (EngineError, OSError) as bad:
        return sandbox.end(Cause(Why.HOST, detail=escaped(f"it could not be adopted: {bad}")))
    if isinstance(instance, ProcessEnd):
        sandbox.oom_kills = instance.oom_kills
        return sandbox.end(Cause(Why.DIED, detail="it died while no daemon was there"))
    sandbox.instance = instance
    if sandbox.cause is not None:
        return None
    points.reached("node.adopt.before_reset")
    try:
        channel, states = await _reattach(context, sandbox, instance, commands)
    except ProtocolError as bad:
        why = Why.UNRESPONSIVE if bad.reason == "unresponsive" else Why.PROTOCOL_ERROR
        return sandbox.end(Cause(why, detail=escaped(str(bad))))
    except (ChannelError, OSError) as bad:
        return sandbox.end(Cause(Why.DIED, detail=escaped(str(bad))))
    if sandbox.state is not SandboxState.RUNNING:  # its end was decided in this very turn of the loop
        return channel.close("ended")
    sandbox.attach(instance, channel)
    sandbox.ready()
    context.spawn(sandbox.way.resume(), f"way out of {sandbox.id}")
    _go_on(sandbox, channel, states, commands)
    return None


def _commands(context: Context, sandbox: Sandbox, past: PastSandbox) -> list[RunningCommand]:
    """Its open commands, with their logs as they stand, in the order of their streams."""
    found = []
    for each in sorted(past.commands.values(), key=lambda command: command.stream):
        record = context.store.command(sandbox.id, each.id)
        if record is None:
            context.log.error("a command's record is gone", sandbox=sandbox.id, command=each.id)
            continue
        directory = context.store.command_dir(sandbox.id, each.id)
        log = _log(context, directory, record.request)
        sandbox.way.denials_again(record)
        running = sandbox.new_running(record, log)
        running.cause = each.cause
        running.stdin.closed = each.stdin_closed
        running.is_open = True  # as far as is known; the guest's STATE tells
        sandbox.take_over(running)
        found.append(running)
    return found


def _log(context: Context, directory: Any, request: dict[str, Any]) -> CommandLog:
    limits = {"bytes_max": request["output_bytes_max"], "on_full": request["on_full"]}
    try:
        return CommandLog.recover(directory, **limits)
    except LogBroken as bad:  # a disk that lost bytes: keep the rest of the sandbox, start this log anew
        context.log.error("a command's log is broken", directory=str(directory), error=str(bad))
        for name in ("output", "index"):
            (directory / name).rename(directory / f"{name}.broken")
        return CommandLog.create(directory, **limits)


async def _reattach(
    context: Context, sandbox: Sandbox, instance: Instance, commands: list[RunningCommand]
) -> tuple[Channel, tuple[dict[int, StreamState], dict[int, int]]]:
    kept: dict[int, int] = {}

    def logged(states: dict[int, StreamState]) -> dict[int, int]:
        points.reached("node.adopt.during_reset")
        for command in commands:
            kept.update(_kept(command, states))
        return kept

    channel, states = await Channel.reattach(
        instance.channel,
        logged=logged,
        guest_open=sandbox.way.guest_open,
        budget=context.budget,
        on_lost=sandbox.lost,
        timeout_s=STATE_S,
    )
    return channel, (states, kept)


def _kept(command: RunningCommand, states: dict[int, StreamState]) -> dict[int, int]:
    """Where each of its streams goes on. While one is being ended, bytes may have been dropped on purpose."""
    kept = {}
    first = states.get(command.record.stream)
    if first is None or first.op != "exec" or first.command != command.id:
        return {}
    fds = (STDOUT, STDERR) if command.record.has_stderr else (STDOUT,)
    for number, fd in enumerate(fds):
        state = states.get(command.record.stream + 2 * number)
        if state is not None and state.op in ("exec", "exec.stderr"):
            at = command.log.logged(fd)
            kept[command.record.stream + 2 * number] = max(at, state.acked) if command.cause is not None else at
    return kept


def _go_on(
    sandbox: Sandbox,
    channel: Channel,
    attached: tuple[dict[int, StreamState], dict[int, int]],
    commands: list[RunningCommand],
) -> None:
    states, kept = attached
    for command in commands:
        if command.record.stream in kept:
            command.adopt(channel, states, kept)
    for command in commands:
        if command.record.stream in kept:
            continue
        if command.record.stream >= channel.next_stream_id():
            command.is_open = False
            sandbox.open_again(command)
        else:
            command.forgotten_by_guest()
    first = sandbox.record.first_command
    if sandbox.record.end_with_command and first is not None and first not in sandbox.running:
        sandbox.end(Cause(Why.COMMAND, by="command"))
