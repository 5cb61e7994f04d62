"""Approvals, as a Backend answers for them: the room `approvals/` does the work, here is what is written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloche.wire.approvals import Answer, Approval, ApprovalList
from cloche_server.api.backend import Caller
from cloche_server.approvals.asking import Announcer, Approvals
from cloche_server.approvals.webhook import Webhook
from cloche_server.egress.services import Question
from cloche_server.node.context import Context


class Approving:
    """The approvals' part of `api.backend.Backend`."""

    approvals: Approvals
    """Made with the node."""

    async def list_approvals(
        self, caller: Caller, *, after: int | None, wait_s: float, include_over: bool
    ) -> ApprovalList:
        return await self.approvals.list(caller, after=after, wait_s=wait_s, include_over=include_over)

    async def answer_approval(self, caller: Caller, approval: str, answer: Answer) -> Approval:
        return self.approvals.answer(caller, approval, answer)

    async def answer_by_token(self, token: str, answer: Answer) -> Approval:
        return self.approvals.answer_by_token(token, answer)


def open_approvals(
    context: Context,
    *,
    scope_s_max: Callable[[], float | None],
    webhook: Callable[[], tuple[str, bytes] | None] = lambda: None,
) -> Approvals:
    """`scope_s_max` and `webhook` (URL and key) are the organisation's, asked for each question."""
    hooks: dict[tuple[str, bytes], Webhook] = {}

    def told(kind: str, question: Question, detail: dict[str, Any]) -> None:
        target = {"host": question.host, "port": question.port, "address": question.address, "rule": question.rule}
        context.journal.write(
            kind,
            sandbox=question.sandbox,
            command=question.command,
            owner=question.owner,
            tenant=question.tenant,
            detail={**target, **detail},
        )

    def hook_told(kind: str, approval: str, detail: dict[str, Any]) -> None:
        context.journal.write(kind, detail={"approval": approval, **detail})

    def announcer() -> Announcer | None:
        wanted = webhook()
        if wanted is None:
            return None
        if wanted not in hooks:
            hooks.clear()
            hooks[wanted] = Webhook(*wanted, spawn=context.spawn, told=hook_told)
        return hooks[wanted]

    return Approvals(scope_s_max=scope_s_max, told=told, announcer=announcer)
