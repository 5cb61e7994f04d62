"""When a sandbox must end, and how an end is told: pure functions from facts to `End`.

A *cause* is chosen once, by whoever decides first, and journalled before anything is killed. The rest (the OOM
counter, the agent's last word, the death of the process) are facts. An end never comes from a wait status alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from cloche.wire import defaults
from cloche.wire.ends import End, EndReason
from cloche.wire.errors import GUEST_CODES
from cloche.wire.sandboxes import SandboxState
from cloche_server.node.clock import NS, seconds
from cloche_server.node.guest_text import escaped

MAXIMUM_S: Final = float(defaults.TTL_S_MAX)
DETAIL_CHARS_MAX: Final = 500


class Why(StrEnum):
    """Why something is being ended: the first one to be journalled counts."""

    KILLED = "killed"
    TTL = "ttl"
    IDLE = "idle"
    MAXIMUM = "maximum"
    COMMAND = "command"  # end_with_command, and that command ended
    TIMEOUT = "timeout"  # a command's timeout_s
    OUTPUT_LIMIT = "output_limit"
    PROTOCOL_ERROR = "protocol_error"
    UNRESPONSIVE = "unresponsive"
    DIED = "died"  # the engine's process, or the channel, is gone and nobody here did it
    HOST = "host"  # the node, the machine or the log's disk failed
    CREATE_FAILED = "create_failed"


@dataclass(frozen=True)
class Cause:
    """Who decided, and what they said."""

    why: Why
    by: str | None = None
    detail: str | None = None


@dataclass(frozen=True)
class Facts:
    """What is known when an engine's process is gone."""

    cause: Cause
    oom_kills: int = 0
    command_end: End | None = None
    """For COMMAND: how that command ended."""


_PLAIN: Final[dict[Why, EndReason]] = {
    Why.PROTOCOL_ERROR: EndReason.PROTOCOL_ERROR,
    Why.UNRESPONSIVE: EndReason.UNRESPONSIVE,
    Why.DIED: EndReason.HOST_FAILURE,
    Why.HOST: EndReason.HOST_FAILURE,
    Why.CREATE_FAILED: EndReason.HOST_FAILURE,
    Why.OUTPUT_LIMIT: EndReason.OUTPUT_LIMIT,
}
_BY_THE_CLOCK: Final = (Why.TTL, Why.IDLE, Why.MAXIMUM, Why.TIMEOUT)
_MAY_BE_OOM: Final = (Why.DIED, Why.UNRESPONSIVE, Why.HOST)
"""An OOM kill takes the whole sandbox and looks like a crash, a silence, or (daemon down) like nothing at all."""


def sandbox_end(facts: Facts, at: float) -> End:
    """The one typed end of a sandbox."""
    cause = facts.cause
    detail = short(cause.detail)
    if facts.oom_kills > 0 and cause.why in _MAY_BE_OOM:
        return End(reason=EndReason.OUT_OF_MEMORY, detail="the kernel ended it at its memory limit", at=at)
    if cause.why is Why.COMMAND and facts.command_end is not None:
        return facts.command_end.model_copy(update={"by": facts.command_end.by or "command", "at": at})
    if cause.why in _BY_THE_CLOCK:
        return End(reason=EndReason.TIMED_OUT, by=cause.why.value, detail=detail, at=at)
    if cause.why in _PLAIN:
        return End(reason=_PLAIN[cause.why], detail=detail, at=at)
    return End(reason=EndReason.KILLED, by=cause.by, detail=detail, at=at)


def command_end(answer: dict[str, object], cause: Cause | None, at: float) -> End:
    """The end of a command whose END has come; `cause` is what this node did to it, if it did."""
    failure = answer.get("error")
    if isinstance(failure, dict):
        return _not_started(failure, cause, at)
    ok = answer.get("ok")
    said = ok if isinstance(ok, dict) else {}
    code, signal = _small(said.get("code")), _small(said.get("signal"))
    if cause is not None and (code is None or cause.why is not Why.KILLED):
        return _ended_by_us(cause, code, signal, at)
    if code is not None:
        return End(reason=EndReason.EXITED, exit_code=code, at=at)
    if signal is not None:
        return End(reason=EndReason.SIGNALLED, signal=signal, at=at)
    return End(reason=EndReason.PROTOCOL_ERROR, detail="the agent's END says neither code nor signal", at=at)


def _ended_by_us(cause: Cause, code: int | None, signal: int | None, at: float) -> End:
    """A process that returned a code before a kill reached it did exit; a limit that was passed stays the reason."""
    detail = short(cause.detail)
    if cause.why is Why.OUTPUT_LIMIT or cause.why in _PLAIN:
        return End(reason=_PLAIN[cause.why], exit_code=code, signal=signal, detail=detail, at=at)
    if cause.why in _BY_THE_CLOCK:
        if code is not None:
            return End(reason=EndReason.EXITED, exit_code=code, at=at)
        return End(reason=EndReason.TIMED_OUT, signal=signal, by=cause.why.value, detail=detail, at=at)
    return End(reason=EndReason.KILLED, signal=signal, by=cause.by, detail=detail, at=at)


def _not_started(failure: dict[str, object], cause: Cause | None, at: float) -> End:
    code = str(failure.get("code", "io"))
    message = short(escaped(str(failure.get("message", ""))))
    if cause is not None:
        return _ended_by_us(cause, None, None, at)
    ours = "command_not_found" if code == "not_found" else GUEST_CODES.get(code, "guest_io")
    return End(reason=EndReason.NOT_STARTED, detail=message, error_code=ours, at=at)


def end_with_sandbox(end: End) -> End:
    """The end of a command that was running when its sandbox ended."""
    if end.reason in (EndReason.KILLED, EndReason.EXITED, EndReason.SIGNALLED, EndReason.NOT_STARTED):
        return End(reason=EndReason.KILLED, by="sandbox", at=end.at)
    return replace_code(end)


def replace_code(end: End) -> End:
    return end.model_copy(update={"exit_code": None, "signal": None, "error_code": None})


def _small(value: object) -> int | None:
    return value if type(value) is int and -1024 <= value <= 1024 else None


def short(text: str | None) -> str | None:
    return text if text is None or len(text) <= DETAIL_CHARS_MAX else text[: DETAIL_CHARS_MAX - 1] + "…"


# --------------------------------------------------------------------------------------------- times


@dataclass(frozen=True)
class Life:
    """The three times of a sandbox, on the boot clock."""

    created_ns: int
    ttl_deadline_ns: int
    idle_timeout_s: float | None = None
    maximum_s: float = MAXIMUM_S

    @classmethod
    def begin(cls, now_ns: int, ttl_s: float, idle_timeout_s: float | None, maximum_s: float = MAXIMUM_S) -> Life:
        life = cls(now_ns, now_ns, idle_timeout_s, maximum_s)
        return life.extended(now_ns, ttl_s)

    @property
    def maximum_ns(self) -> int:
        return self.created_ns + seconds(self.maximum_s)

    def extended(self, now_ns: int, ttl_s: float) -> Life:
        """Lives at least `ttl_s` from now, never less than before, never beyond the hard maximum."""
        wanted = max(self.ttl_deadline_ns, now_ns + seconds(ttl_s))
        return replace(self, ttl_deadline_ns=min(wanted, self.maximum_ns))

    def deadline(self, idle_since_ns: int | None) -> tuple[int, Why]:
        """When it must end as things stand, and why. `idle_since_ns` is None while a command or a request is open."""
        why = Why.MAXIMUM if self.ttl_deadline_ns >= self.maximum_ns else Why.TTL
        best = (self.ttl_deadline_ns, why)
        if idle_since_ns is not None and self.idle_timeout_s is not None:
            best = min(best, (idle_since_ns + seconds(self.idle_timeout_s), Why.IDLE))
        return best

    def ends_in_s(self, now_ns: int, idle_since_ns: int | None) -> float:
        return max(0.0, (self.deadline(idle_since_ns)[0] - now_ns) / NS)


NEXT: Final[dict[SandboxState, frozenset[SandboxState]]] = {
    SandboxState.CREATING: frozenset({SandboxState.RUNNING, SandboxState.ENDING}),
    SandboxState.RUNNING: frozenset({SandboxState.ENDING}),
    SandboxState.ENDING: frozenset({SandboxState.ENDED}),
    SandboxState.ENDED: frozenset(),
}


def step(now: SandboxState, then: SandboxState) -> SandboxState:
    """The only way a state changes; a step that does not exist is a programmer's mistake."""
    assert then in NEXT[now], f"{now} → {then}"
    return then
