"""How things end. Every command and every sandbox ends with exactly one of these reasons (EXE-5)."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pydantic import BaseModel, ConfigDict


class EndReason(StrEnum):
    """A closed list; "it vanished" is not on it."""

    EXITED = "exited"  # the process returned a code
    SIGNALLED = "signalled"  # a signal that nobody here sent ended the process
    TIMED_OUT = "timed_out"  # the command's timeout_s, or the sandbox's ttl / idle / maximum
    OUT_OF_MEMORY = "out_of_memory"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"  # by whom: End.by
    PROTOCOL_ERROR = "protocol_error"  # the guest broke the channel's contract
    UNRESPONSIVE = "unresponsive"  # the guest's agent stopped answering
    HOST_FAILURE = "host_failure"  # the engine, the node or the machine failed
    NOT_STARTED = "not_started"  # a command that could not be started (no such program, no such user)


CLI_EXIT_CODES: Final[dict[EndReason, int]] = {
    EndReason.TIMED_OUT: 124,
    EndReason.OUT_OF_MEMORY: 137,
    EndReason.OUTPUT_LIMIT: 153,
    EndReason.KILLED: 137,
    EndReason.PROTOCOL_ERROR: 125,
    EndReason.UNRESPONSIVE: 125,
    EndReason.HOST_FAILURE: 125,
    EndReason.NOT_STARTED: 127,
}
"""`exited` gives the program's own code, `signalled` 128 + signal, as shells do."""
_THERE_BUT_NOT_STARTED: Final = ("not_executable", "permission_denied", "no_such_user")


class End(BaseModel):
    """One end: the reason, and what is known about it."""

    model_config = ConfigDict(frozen=True)

    reason: EndReason
    exit_code: int | None = None
    signal: int | None = None
    by: str | None = None
    """Who ended it, for `killed` and `timed_out`: a user, or `ttl`, `idle`, `maximum`, `timeout`, `sandbox` (a command whose sandbox ended)."""
    detail: str | None = None
    error_code: str | None = None
    """For `not_started`: the code from the error table that says why."""
    at: float | None = None
    """Wall time, for display only."""

    @property
    def cli_exit_code(self) -> int:
        if self.reason is EndReason.EXITED:
            return self.exit_code if self.exit_code is not None else 125
        if self.reason is EndReason.SIGNALLED:
            return 128 + (self.signal or 0)
        if self.reason is EndReason.NOT_STARTED and self.error_code in _THERE_BUT_NOT_STARTED:
            return 126
        return CLI_EXIT_CODES[self.reason]
