"""Secrets and approvals for `MemoryBackend`: kept in a dictionary."""

from __future__ import annotations

from cloche.wire.approvals import Answer, Approval, ApprovalList
from cloche.wire.errors import error
from cloche.wire.secrets import SecretView, SetSecret
from cloche_server.api.backend import Caller


class MemoryPeople:
    """What an operator binds, and what a person answers."""

    def __init__(self) -> None:
        super().__init__()
        self.bound: dict[tuple[str, str], SecretView] = {}
        self.questions: dict[str, Approval] = {}
        self.tokens: dict[str, str] = {}

    async def set_secret(self, caller: Caller, name: str, request: SetSecret) -> SecretView:
        view = SecretView(
            name=name,
            owner=caller.owner,
            source=request.source.kind,
            hosts=request.hosts,
            methods=request.methods,
            paths=request.paths,
            places=request.places,
            require=request.require,
            set_at=0.0,
        )
        self.bound[caller.owner, name] = view
        return view

    async def list_secrets(self, caller: Caller) -> list[SecretView]:
        return [view for (owner, _), view in self.bound.items() if caller.is_admin or owner == caller.owner]

    async def remove_secret(self, caller: Caller, name: str) -> SecretView:
        found = self.bound.pop((caller.owner, name), None)
        if found is None:
            raise error("secret_not_found", f"There is no secret {name!r}.")
        return found

    async def list_approvals(
        self, caller: Caller, *, after: int | None, wait_s: float, include_over: bool
    ) -> ApprovalList:
        found = [each for each in self.questions.values() if include_over or each.state == "waiting"]
        return ApprovalList(approvals=found, cursor=len(self.questions))

    async def answer_approval(self, caller: Caller, approval: str, answer: Answer) -> Approval:
        found = self.questions.get(approval)
        if found is None:
            raise error("approval_not_found", f"There is no question {approval[:64]!r}.")
        state = "approved" if answer.answer == "approve" else "denied"
        self.questions[approval] = found.model_copy(update={"state": state, "answered_by": caller.owner})
        return self.questions[approval]

    async def answer_by_token(self, token: str, answer: Answer) -> Approval:
        approval = self.tokens.pop(token, None)
        if approval is None:
            raise error("approval_not_found", "There is no question for this token.")
        return await self.answer_approval(Caller("", "token"), approval, answer)
