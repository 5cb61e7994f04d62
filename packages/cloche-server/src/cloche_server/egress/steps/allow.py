"""The policy decides, by name, port and, where they are seen, method and path."""

from __future__ import annotations

from typing import Final

from cloche_server.egress.attempt import Attempt, Refused
from cloche_server.policy.model import Carries, Decision, Effect

_HARDEST_FIRST: Final = (Effect.DENY, Effect.ASK, Effect.ALLOW)


async def step(attempt: Attempt) -> None:
    attempt.decision = decision = decided(attempt)
    if decision.effect is Effect.DENY:
        raise Refused(decision.code, decision.text, decision.rule)
    attempt.intercepted = needs_interceptor(attempt, decision.carries, intercept=decision.intercept)


def decided(attempt: Attempt) -> Decision:
    """By today's policy. A request that a header makes another of must be allowed as both."""
    policy, target = attempt.policy, attempt.at()
    decision = policy.connect(target)
    if decision.effect is Effect.DENY or attempt.path is None:
        return decision
    path, approved = attempt.path, attempt.approved
    seen = [policy.request(target, method, path, approved=approved) for method in attempt.methods]
    return next((each for effect in _HARDEST_FIRST for each in seen if each.effect is effect), decision)


def needs_interceptor(attempt: Attempt, carries: Carries, *, intercept: bool) -> bool:
    """The gate sees methods and paths of plain HTTP itself; what TLS holds, and any HTTP when secrets could be in it, not."""
    if carries is Carries.ANY:
        return False
    if attempt.gate.placeholders() is not None and carries is not Carries.TLS:
        return True
    return intercept and carries is not Carries.HTTP
