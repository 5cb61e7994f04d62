"""`Approvals`: asks, waits a bounded time, tells. The gate calls `ask`; people answer from outside."""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from cloche.wire.approvals import Answer, Approval, ApprovalList
from cloche.wire.errors import ClocheError, error
from cloche_server.approvals.queue import Asked, Queue, Verdict
from cloche_server.approvals.tokens import digest_of, new_token
from cloche_server.egress.services import Question

WAIT_S_MAX: Final = 60.0
"""Of one long poll."""
BY_TOKEN: Final = "webhook"
Told = Callable[[str, Question, dict[str, Any]], None]


class Asker(Protocol):
    """Who asks the API, as `api.backend.Caller` has it."""

    @property
    def tenant(self) -> str: ...

    @property
    def owner(self) -> str: ...

    @property
    def is_admin(self) -> bool: ...


class Announcer(Protocol):
    """Somebody outside who is told of a new question; must return at once."""

    def announce(self, approval: Approval, token: str, is_open: Callable[[], bool]) -> None: ...


class Approvals:
    """One for a node. `told` writes the journal, before the effect; `scope_s_max` is the organisation's, asked each time."""

    def __init__(
        self,
        *,
        scope_s_max: Callable[[], float | None] = lambda: None,
        told: Told = lambda _kind, _question, _detail: None,
        announcer: Callable[[], Announcer | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._queue = Queue(cursor=int(wall() * 1000))
        self._scope_s_max = scope_s_max
        self._told = told
        self._announcer = announcer
        self._clock = clock
        self._wall = wall
        self._futures: dict[str, asyncio.Future[Verdict]] = {}
        self._tokens: dict[bytes, str] = {}
        self._changed = asyncio.Event()

    # --- for the gate -------------------------------------------------------------------------------

    async def ask(self, question: Question, *, timeout_s: float) -> Verdict:
        """Waits for a person; without one, no. Who gives up waiting takes the question back."""
        asked = self._queue.ask(
            question,
            now=self._clock(),
            wall=self._wall(),
            timeout_s=timeout_s,
            scope_s_max=self._scope_s_max(),
        )
        if isinstance(asked, Verdict):
            self._told("approval.used" if asked.approved else "approval.refused", question, _of_verdict(asked))
            return asked
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._futures[asked.id] = future
        try:
            self._told("approval.asked", asked.question, {"approval": asked.id})
            self._announce(asked)
            self._notify()
            await asyncio.wait([future], timeout=max(0.0, asked.ends_at - self._clock()))
            if not future.done():
                self._settle(self._queue.expire(max(self._clock(), asked.ends_at)))
            return future.result() if future.done() else Verdict(False, None, "timed_out")
        finally:
            del self._futures[asked.id]
            self._tokens = {digest: each for digest, each in self._tokens.items() if each != asked.id}
            left = self._queue.void_one(asked, "the asker left")
            self._settle([left] if left is not None else [])

    def void(self, sandbox: str, why: str) -> None:
        """After a change of policy, a restore, a fork, an end: what was asked and what was granted belong to the past."""
        self._settle(self._queue.void(sandbox, why))

    # --- for people ---------------------------------------------------------------------------------

    async def list(
        self, asker: Asker, *, after: int | None = None, wait_s: float = 0.0, include_over: bool = False
    ) -> ApprovalList:
        """What waits. With `after`, the cursor of an earlier answer: as soon as something changed, at the latest after `wait_s`."""
        until = self._clock() + min(wait_s, WAIT_S_MAX)
        while after is not None and not self._has_changed(asker, after) and (left_s := until - self._clock()) > 0:
            changed = self._changed
            try:
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                break
        now = self._clock()
        found = [each for each in self._queue.all() if _may_see(asker, each)]
        shown = [each.view(now) for each in found if include_over or each.state == "waiting"]
        return ApprovalList(approvals=shown, cursor=self._queue.cursor)

    def answer(self, asker: Asker, approval: str, answer: Answer) -> Approval:
        """Once. Raises approval_not_found, approval_over, approval_scope_refused."""
        asked = self._queue.find(approval, lambda each: _may_see(asker, each))
        return self._answer(asked, answer, asker.owner)

    def answer_by_token(self, token: str, answer: Answer) -> Approval:
        """For whoever was told by the webhook: this one action, once, as long as the question waits."""
        found = self._tokens.get(digest_of(token))  # by its hash: how long that takes tells nothing of a token
        asked = None if found is None else self._queue.waiting.get(found)
        if asked is None:
            raise error("approval_not_found", "The token is not one of a question that waits.")
        if answer.scope_s is not None:
            raise error(
                "approval_scope_refused", "A token approves one action; a scope is given by a person who is known."
            )
        return self._answer(asked, answer, BY_TOKEN)

    def _answer(self, asked: Asked, answer: Answer, by: str) -> Approval:
        now = self._clock()
        ended = self._queue.answer(asked, approve=answer.answer == "approve", by=by, now=now, scope_s=answer.scope_s)
        self._settle([ended], scope_s=answer.scope_s)
        return ended.view(now)

    # --- telling ------------------------------------------------------------------------------------

    def _settle(self, ended: builtins.list[Asked], *, scope_s: float | None = None) -> None:
        for each in ended:
            detail: dict[str, Any] = {"approval": each.id, "verdict": each.state, "by": each.by, "why": each.why}
            if scope_s is not None and each.state == "approved":
                detail["scope_s"] = scope_s
            self._told("approval.answered", each.question, detail)
            future = self._futures.get(each.id)
            if future is not None and not future.done():
                future.set_result(each.verdict())
        if ended:
            self._notify()

    def _announce(self, asked: Asked) -> None:
        """A webhook that is set up wrongly is told in the journal; people can answer all the same."""
        try:
            announcer = self._announcer()
        except (OSError, ClocheError) as failed:
            why = failed.message if isinstance(failed, ClocheError) else f"its key cannot be read ({failed.strerror})"
            self._told("approval.not_announced", asked.question, {"approval": asked.id, "why": why})
            return
        if announcer is not None:
            token = new_token()
            self._tokens[digest_of(token)] = asked.id
            announcer.announce(asked.view(self._clock()), token, lambda: asked.id in self._queue.waiting)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _has_changed(self, asker: Asker, after: int) -> bool:
        """Also when the cursor is another daemon's. What an asker may not see does not wake him."""
        if after > self._queue.cursor:
            return True
        return any(each.changed > after and _may_see(asker, each) for each in self._queue.all())


def _may_see(asker: Asker, asked: Asked) -> bool:
    question = asked.question
    return asker.is_admin or (asker.owner, asker.tenant) == (question.owner, question.tenant)


def _of_verdict(verdict: Verdict) -> dict[str, Any]:
    return {"verdict": verdict.reason, "by": verdict.by}
