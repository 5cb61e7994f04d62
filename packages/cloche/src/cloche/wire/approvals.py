"""Approvals as the API shows them: one action that waits, bounded, for a person."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from . import defaults


class Approval(BaseModel):
    """One question. All text that a guest chose in it is escaped already."""

    id: str
    sandbox: str
    owner: str
    command: str | None = None
    command_line: str | None = None
    kind: Literal["egress"] = "egress"
    rule: str
    host: str
    port: int
    address: str
    method: str | None = None
    path: str | None = None
    asked_at: float
    age_s: float
    ends_in_s: float
    state: Literal["waiting", "approved", "denied", "timed_out", "void"]
    answered_by: str | None = None
    scope_s_max: float | None = None
    """The longest scope that may be given; None: this one action only."""


class ApprovalList(BaseModel):
    """`GET /v1/approvals`."""

    approvals: list[Approval]
    cursor: int = 0
    """Give it as `after` to wait for a change."""


class Answer(BaseModel):
    """`POST /v1/approvals/{id}`."""

    model_config = ConfigDict(extra="forbid")

    answer: Literal["approve", "deny"]
    scope_s: float | None = Field(default=None, gt=0, le=defaults.APPROVAL_SCOPE_S_MAX)
    """Also for the same host and port from the same sandbox, this long. Only where the organisation's file enables it."""
