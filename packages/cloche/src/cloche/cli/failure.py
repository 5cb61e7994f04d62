"""Errors and ends as a person reads them: what happened, why, and the next command to type (UX-6)."""

import shlex
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

from cloche.cli import units
from cloche.cli.escape import line
from cloche.cli.render import say, sign, styled
from cloche.wire import ids
from cloche.wire.ends import End, EndReason

if TYPE_CHECKING:
    from cloche.wire.commands import Command
    from cloche.wire.errors import ClocheError
    from cloche.wire.sandboxes import Sandbox

TEXT_WIDTH_MAX: Final = 600
QUIET_SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGPIPE, signal.SIGTERM, signal.SIGHUP})
MEMORY_TO_TRY: Final = 512 * 1024**2


def show(code: str, message: str, context: list[str], fix: str | None) -> None:
    """`✗ code: message`, one line of context, one of advice; all on stderr, all escaped."""
    mark = styled(sign("✗", "x", sys.stderr), "31", sys.stderr)
    end = "" if message.endswith((".", "!", "?")) else "."
    say(f"{mark} {styled(code, '1', sys.stderr)}: {line(message, TEXT_WIDTH_MAX)}{end}")
    dot = sign(" · ", " - ", sys.stderr)
    if context:
        say("  " + dot.join(line(part, 200) for part in context))
    if fix:
        say("  " + line(fix, TEXT_WIDTH_MAX))


def show_error(error: "ClocheError") -> int:
    """Prints it; answers the exit code."""
    context = [f"{key.replace('_', ' ')} {_plain(value)}" for key, value in error.detail.items() if value is not None]
    fix = error.fix
    if error.retry_after_s is not None:
        context.append(f"try again in {error.retry_after_s:.0f} s")
    show(error.code, error.message, context, fix)
    return error.kind.exit_code


def show_end(command: "Command | None", sandbox: "Sandbox | None") -> int:
    """How a command ended, when its own output does not say it; answers the exit code."""
    end = command.ended if command and command.ended else sandbox.ended if sandbox else None
    if end is None:
        show("host_failure", "the node has no end for this command", [], "See why: cloche node logs")
        return 125
    if end.reason is EndReason.KILLED and end.by == "sandbox" and sandbox and sandbox.ended:
        end = sandbox.ended  # the sandbox ended first and took the command with it: say why it did
    if end.reason is EndReason.EXITED:
        return end.cli_exit_code
    if end.reason is EndReason.SIGNALLED and end.signal in QUIET_SIGNALS:
        return end.cli_exit_code
    message, fix = _explain(end, command, sandbox)
    code = end.error_code if end.reason is EndReason.NOT_STARTED and end.error_code else end.reason.value
    show(code, message, _context(end, command, sandbox), fix)
    return end.cli_exit_code


def _explain(end: End, command: "Command | None", sandbox: "Sandbox | None") -> tuple[str, str]:
    name = ids.short(sandbox.id) if sandbox else "ID"
    match end.reason:
        case EndReason.OUT_OF_MEMORY:
            return _out_of_memory(sandbox, name)
        case EndReason.TIMED_OUT:
            return _timed_out(end, command)
        case EndReason.OUTPUT_LIMIT:
            return (
                "the command wrote more output than it may keep and was ended by the node",
                "Ask for more (output_bytes_max), or write it to a file inside and copy that: cloche cp",
            )
        case EndReason.SIGNALLED:
            return (
                f"the command was ended by signal {_signal_name(end.signal)}",
                f"See what it printed: cloche logs {name}",
            )
        case EndReason.KILLED:
            by = f" by {who(end.by)}" if end.by else ""
            return f"the command was killed{by}", "What it printed is still there: cloche logs " + name
        case EndReason.NOT_STARTED:
            return end.detail or "the command could not be started", _not_started_fix(end)
        case EndReason.PROTOCOL_ERROR:
            return (
                end.detail or "the guest broke the channel's contract and was ended",
                "Create a new sandbox; see why: cloche node logs",
            )
        case EndReason.UNRESPONSIVE:
            return (
                end.detail or "the guest stopped answering and was ended",
                "Create a new sandbox; see why: cloche node logs",
            )
        case _:
            return end.detail or "the engine, the node or the machine failed", "See why: cloche node logs"


def _out_of_memory(sandbox: "Sandbox | None", name: str) -> tuple[str, str]:
    limit = sandbox.limits.memory_bytes if sandbox else 0
    more = units.size_flag(max(2 * limit, MEMORY_TO_TRY))
    text = f"the sandbox reached its memory limit of {units.size(limit)} and was ended by the node"
    return text, f"Try --memory {more}, or see what used it: cloche logs {name} --events"


def _timed_out(end: End, command: "Command | None") -> tuple[str, str]:
    match end.by:
        case "idle":
            return "the sandbox was idle for longer than its idle time-out", "Create it with a longer idle_timeout_s."
        case "maximum":
            return "the sandbox reached the longest life that a sandbox may have", "Start a new one."
        case "ttl":
            return "the sandbox reached the end of its time to live", "Create it with a longer one: --ttl 1h"
    limit = command.timeout_s if command else None
    words = f" of {units.words(limit)}" if limit else ""
    more = f"{int(limit * 2)}s" if limit and limit < 60 else f"{int((limit or 300) / 60 * 2)}m"
    return f"the command reached its time limit{words} and was ended by the node", f"Try --timeout {more}."


def _not_started_fix(end: End) -> str:
    from cloche.wire.errors import TABLE

    kind = TABLE.get(end.error_code or "command_not_found", TABLE["command_not_found"])
    return kind.fix


def _context(end: End, command: "Command | None", sandbox: "Sandbox | None") -> list[str]:
    parts: list[str] = []
    if end.reason is EndReason.OUT_OF_MEMORY and sandbox and sandbox.usage and sandbox.usage.memory_peak_bytes:
        parts.append(f"peak {sandbox.usage.memory_peak_bytes / 1024**2:.1f} MB")
    if command:
        parts.append(f"while running `{line(shlex.join(command.argv), 60)}` ({ids.short(command.id)})")
        if command.runtime_s is not None:
            parts.append(f"{command.runtime_s:.1f} s after start")
    elif sandbox:
        parts.append(f"sandbox {ids.short(sandbox.id)}")
    return parts


def who(owner: str) -> str:
    """`you`, a user's name, or what the node says."""
    from cloche.cli.ps import owner_name

    name = owner_name(owner)
    return "you" if name == "me" else name


def _signal_name(number: int | None) -> str:
    try:
        return f"{number} ({signal.Signals(number or 0).name})"
    except ValueError:
        return str(number)


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
