# Made by tools/unasync.py from packages/cloche/src/cloche/client/_async/approvals.py: edit that one.
"""Approvals: what waits for a person, and the answer."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Final, Literal
from urllib.parse import quote

from cloche.client._requests import read_model, request_body
from cloche.client._sync.transport import Transport
from cloche.wire.approvals import Answer, Approval, ApprovalList

POLL_S: Final = 25.0
"""Of one long poll; the next one goes on from its cursor."""
_PATH: Final = "/v1/approvals"


class Approvals:
    """The questions of a node that you may answer."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self, *, include_over: bool = False) -> builtins.list[Approval]:
        """Those that wait; with `include_over` also those that are over, while they are kept."""
        return (self.changes(include_over=include_over)).approvals

    def changes(self, after: int | None = None, *, wait_s: float = 0.0, include_over: bool = False) -> ApprovalList:
        """With `after`, the cursor of an earlier answer: as soon as something changed, at the latest after `wait_s`."""
        query = {"after": after, "wait_s": wait_s, "all": include_over}
        timeout_s = self._transport.request_timeout_s + wait_s
        answer = self._transport.request("GET", _PATH, query=query, timeout_s=timeout_s)
        return read_model(ApprovalList, answer.body)

    def watch(self) -> Iterator[builtins.list[Approval]]:
        """All that wait, now and after each change. Without end: leave it when you have seen enough."""
        cursor: int | None = None
        while True:
            found = self.changes(cursor, wait_s=0.0 if cursor is None else POLL_S)
            if found.cursor != cursor:
                yield found.approvals
            cursor = found.cursor

    def approve(self, approval: str, *, scope_s: float | None = None) -> Approval:
        """This one action; with `scope_s` also the same host and port from the same sandbox, where that is allowed."""
        return self._answer(approval, "approve", scope_s)

    def deny(self, approval: str) -> Approval:
        return self._answer(approval, "deny", None)

    def _answer(self, approval: str, answer: Literal["approve", "deny"], scope_s: float | None) -> Approval:
        body = request_body(Answer, answer=answer, scope_s=scope_s)
        reply = self._transport.request("POST", f"{_PATH}/{quote(approval, safe='')}", content=body)
        return read_model(Approval, reply.body)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._transport.target}>"
