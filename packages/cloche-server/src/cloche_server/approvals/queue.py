"""The queue of questions, pure: every call is given the time, and answers what changed.

Bounded: so many waiting for one sandbox and for the node, so many kept after their end, so many scopes. A scope belongs to
one sandbox, host and port, and never outlives its sandbox's policy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from cloche.wire.approvals import Approval
from cloche.wire.defaults import APPROVAL_SCOPE_S_MAX
from cloche.wire.errors import ClocheError, error
from cloche.wire.ids import matches_prefix, new_id, short
from cloche_server.egress.services import Question
from cloche_server.egress.text import escaped

WAITING_OF_ONE_MAX: Final = 64
WAITING_MAX: Final = 1000
OVER_MAX: Final = 256
"""Kept to say that a question was answered, and by whom."""
SCOPES_MAX: Final = 1000
TIMEOUT_S_MAX: Final = 3600.0
TEXT_CHARS_MAX: Final = 500
HOST_CHARS_MAX: Final = 261

State = Literal["waiting", "approved", "denied", "timed_out", "void"]
ScopeKey = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the asker is told. `reason`: approved, scope, denied, timed_out, void, too_many_questions."""

    approved: bool
    by: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Asked:
    """One question, and what became of it."""

    id: str
    question: Question
    asked_at: float
    wall: float
    ends_at: float
    scope_s_max: float | None
    state: State = "waiting"
    by: str | None = None
    why: str = ""
    changed: int = 0
    """The cursor of its last change."""

    def view(self, now: float) -> Approval:
        question = self.question
        return Approval(
            id=self.id,
            sandbox=question.sandbox,
            owner=question.owner,
            command=question.command,
            command_line=question.command_line,
            rule=question.rule,
            host=question.host,
            port=question.port,
            address=question.address,
            method=question.method,
            path=question.path,
            asked_at=self.wall,
            age_s=max(0.0, now - self.asked_at),
            ends_in_s=max(0.0, self.ends_at - now) if self.state == "waiting" else 0.0,
            state=self.state,
            answered_by=self.by,
            scope_s_max=self.scope_s_max,
        )

    def verdict(self) -> Verdict:
        assert self.state != "waiting"
        return Verdict(self.state == "approved", self.by, self.state)


@dataclass(frozen=True, slots=True)
class Scope:
    """Given with an approval."""

    ends_at: float
    by: str
    approval: str


@dataclass(slots=True)
class Queue:
    """`cursor` grows with each change; it begins above that of the daemon before (its start, in ms)."""

    cursor: int = 0
    waiting: dict[str, Asked] = field(default_factory=dict)
    over: OrderedDict[str, Asked] = field(default_factory=OrderedDict)
    scopes: dict[ScopeKey, Scope] = field(default_factory=dict)

    def ask(
        self, question: Question, *, now: float, wall: float, timeout_s: float, scope_s_max: float | None
    ) -> Asked | Verdict:
        """A verdict at once (a scope holds, or too many wait), or the question that waits now."""
        scope = self._scope(question, now)
        if scope is not None:
            return Verdict(True, scope.by, "scope")
        of_one = sum(each.question.sandbox == question.sandbox for each in self.waiting.values())
        if of_one >= WAITING_OF_ONE_MAX or len(self.waiting) >= WAITING_MAX:
            return Verdict(False, None, "too_many_questions")
        most_s = None if scope_s_max is None else min(scope_s_max, APPROVAL_SCOPE_S_MAX)
        ends_at = now + min(timeout_s, TIMEOUT_S_MAX)
        self.cursor += 1
        asked = Asked(new_id("approval"), _harmless(question), now, wall, ends_at, most_s or None, changed=self.cursor)
        self.waiting[asked.id] = asked
        return asked

    def answer(self, asked: Asked, *, approve: bool, by: str, now: float, scope_s: float | None = None) -> Asked:
        """Raises approval_over, approval_scope_refused. A late answer finds the question timed out."""
        if asked.id not in self.waiting or asked.ends_at <= now:
            raise over(asked)
        if scope_s is not None and approve:
            if asked.scope_s_max is None or scope_s > asked.scope_s_max:
                raise _scope_refused(asked)
            self._add_scope(asked, scope_s, by, now)
        return self._end(asked, "approved" if approve else "denied", by=by)

    def expire(self, now: float) -> list[Asked]:
        """Those whose time is over."""
        late = [each for each in self.waiting.values() if each.ends_at <= now]
        return [self._end(each, "timed_out") for each in late]

    def void(self, sandbox: str, why: str) -> list[Asked]:
        """All that a sandbox asked, and the scopes that it was given."""
        for key in [key for key in self.scopes if key[0] == sandbox]:
            del self.scopes[key]
        mine = [each for each in self.waiting.values() if each.question.sandbox == sandbox]
        return [self._end(each, "void", why=why) for each in mine]

    def void_one(self, asked: Asked, why: str) -> Asked | None:
        """Nobody waits for its answer any more."""
        return self._end(asked, "void", why=why) if asked.id in self.waiting else None

    def find(self, text: str, may_see: Callable[[Asked], bool]) -> Asked:
        """By id, its short form or a unique prefix. Those that wait come first."""
        for group in (self.waiting, self.over):
            seen = [each for each in group.values() if may_see(each)]
            found = [each for each in seen if each.id == text] or [
                each for each in seen if len(text) > 1 and matches_prefix(each.id, text)
            ]
            if len(found) > 1:
                raise error("ambiguous", f"{len(found)} questions begin with {text[:40]!r}.")
            if found:
                return found[0]
        raise error("approval_not_found", f"There is no question {text[:40]!r}.")

    def all(self) -> Iterator[Asked]:
        yield from self.waiting.values()
        yield from self.over.values()

    def _scope(self, question: Question, now: float) -> Scope | None:
        key = _key(question)
        scope = self.scopes.get(key)
        if scope is not None and scope.ends_at <= now:
            del self.scopes[key]
            return None
        return scope

    def _add_scope(self, asked: Asked, scope_s: float, by: str, now: float) -> None:
        for key in [key for key, scope in self.scopes.items() if scope.ends_at <= now]:
            del self.scopes[key]
        if len(self.scopes) >= SCOPES_MAX:
            raise error("approval_scope_refused", f"The node has {SCOPES_MAX} scopes already.")
        self.scopes[_key(asked.question)] = Scope(now + scope_s, by, asked.id)

    def _end(self, asked: Asked, state: State, *, by: str | None = None, why: str = "") -> Asked:
        self.cursor += 1
        ended = replace(asked, state=state, by=by, why=why, changed=self.cursor)
        del self.waiting[asked.id]
        self.over[asked.id] = ended
        while len(self.over) > OVER_MAX:
            self.over.popitem(last=False)
        return ended


def over(asked: Asked) -> ClocheError:
    state = "timed_out" if asked.state == "waiting" else asked.state
    by = f" by {asked.by}" if asked.by else ""
    return error(
        "approval_over",
        f"The question {short(asked.id)} is over: {state.replace('_', ' ')}{by}.",
        detail={"state": state, "answered_by": asked.by},
    )


def _scope_refused(asked: Asked) -> ClocheError:
    if asked.scope_s_max is None:
        return error("approval_scope_refused", "The organisation's file allows an approval for one action only.")
    text = f"The organisation's file allows a scope of at most {asked.scope_s_max:g} s."
    return error("approval_scope_refused", text, detail={"scope_s_max": asked.scope_s_max})


def _key(question: Question) -> ScopeKey:
    return question.sandbox, question.host, question.port


def _harmless(question: Question) -> Question:
    """What a guest chose, cut and escaped, whoever asks."""

    def shown(text: str | None) -> str | None:
        return None if text is None else escaped(text, TEXT_CHARS_MAX)

    return replace(
        question,
        host=escaped(question.host, HOST_CHARS_MAX),
        address=escaped(question.address, HOST_CHARS_MAX),
        rule=escaped(question.rule, TEXT_CHARS_MAX),
        method=shown(question.method),
        path=shown(question.path),
        command=shown(question.command),
        command_line=shown(question.command_line),
    )
