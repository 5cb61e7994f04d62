"""What the policy marks *ask* waits, bounded, for a person, who is shown the address that the name has now.

A name that only a pattern or the default matches is not looked up before the answer: the guest chose it, and the query
itself would carry it out.
"""

from __future__ import annotations

from typing import Final

from cloche_server.egress.attempt import Attempt, Refused
from cloche_server.egress.services import Question
from cloche_server.egress.steps import check, resolve
from cloche_server.egress.text import escaped
from cloche_server.policy.model import Effect

NOT_YET: Final = ""
"""Shown as "resolved after your answer"."""


async def step(attempt: Attempt) -> None:
    decision = attempt.decision
    assert decision is not None, "the policy decided before"
    if decision.effect is not Effect.ASK:
        return
    if attempt.intercepted and decision.exact and not attempt.is_request:
        return  # it is asked for each request; only a name that the guest made up is asked for before anything is looked up
    if decision.exact:
        await resolve.step(attempt)
        await check.step(attempt)
        attempt.shown = attempt.addresses[0]
    gate = attempt.gate
    timeout_s = gate.services.organisation().approval_s
    verdict = await gate.services.approvals.ask(_question(attempt), timeout_s=timeout_s)
    if not verdict.approved:
        raise Refused("not_approved", _why_not(verdict.reason, timeout_s), decision.rule)
    if gate.policy is not attempt.policy:
        raise Refused("policy_changed", "the policy changed while it waited for an approval", decision.rule)
    attempt.approved = decision.rule


def _why_not(reason: str, timeout_s: float) -> str:
    words = {
        "denied": "a person denied it",
        "timed_out": f"nobody answered within {timeout_s:g} s",
        "void": "it was asked of a person, and is void now",
        "too_many_questions": "too many questions wait for a person",
    }
    return words.get(reason, "it was not approved")


def _question(attempt: Attempt) -> Question:
    gate, target, decision = attempt.gate, attempt.at(), attempt.decision
    assert decision is not None
    line = gate.command_line_of(attempt.command) if attempt.command is not None else None
    return Question(
        sandbox=gate.who.sandbox,
        owner=gate.who.owner,
        tenant=gate.who.tenant,
        rule=decision.rule,
        host=escaped(target.host, 253),
        port=target.port,
        address=NOT_YET if attempt.shown is None else str(attempt.shown),
        method=None if attempt.method is None else escaped(attempt.method, 32),
        path=None if attempt.path is None else escaped(attempt.path, 1024),
        command=attempt.command,
        command_line=None if line is None else escaped(line),
    )
