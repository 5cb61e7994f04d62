"""The part of a Backend that has questions for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cloche.wire.approvals import Answer, Approval, ApprovalList

if TYPE_CHECKING:
    from cloche_server.api.backend import Caller


class ApprovalsBackend(Protocol):
    """What can be asked about approvals."""

    async def list_approvals(
        self, caller: Caller, *, after: int | None, wait_s: float, include_over: bool
    ) -> ApprovalList:
        """With `after`: as soon as something changed since, at the latest after `wait_s`."""
        ...

    async def answer_approval(self, caller: Caller, approval: str, answer: Answer) -> Approval: ...

    async def answer_by_token(self, token: str, answer: Answer) -> Approval:
        """The token stands for the caller; it answers one question, once."""
        ...
