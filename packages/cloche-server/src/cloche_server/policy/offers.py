"""What the organisation's file offers, and how a request is kept within it."""

from __future__ import annotations

from dataclasses import replace

from cloche.wire.errors import error
from cloche_server.policy.document import Organisation
from cloche_server.policy.index import is_below
from cloche_server.policy.model import Effect, Rule, Target
from cloche_server.policy.paths import covers
from cloche_server.policy.rules import ANY_HOST, SUFFIX, rule_text


def narrowed(organisation: Organisation, rule: Rule) -> Rule:
    """The rule as the organisation lets it hold: asked where the offer asks, intercepted where it intercepts.

    `policy_refused` when no single rule of `offer` or `allow` covers it. A denial is always taken.
    """
    if rule.effect is Effect.DENY or organisation.offer is None:
        return rule
    for offer in (*organisation.offer, *organisation.allow):
        if is_within(rule, offer):
            asks = Effect.ASK if Effect.ASK in (rule.effect, offer.effect) else Effect.ALLOW
            return replace(rule, effect=asks, intercept=rule.intercept or offer.intercept)
    text = f"Rule {rule.id} ({rule_text(rule)}) goes beyond what the organisation's file offers."
    raise error("policy_refused", text, detail={"rule": rule.id, "host": rule.host})


def is_offered(organisation: Organisation, target: Target) -> bool:
    """Whether a request could ask for this host at all."""
    if organisation.offer is None:
        return True
    return any(_host_is_within(target.host, offer.host) for offer in organisation.offer)


def is_within(rule: Rule, offer: Rule) -> bool:
    """Whether everything that `rule` speaks of is something that `offer` speaks of."""
    if not _host_is_within(rule.host, offer.host) or not rule.ports <= offer.ports:
        return False
    if rule.tcp and not offer.tcp:
        return False
    if offer.methods is not None and (rule.methods is None or not rule.methods <= offer.methods):
        return False
    if offer.paths is None:
        return True
    return rule.paths is not None and all(any(covers(wide, path) for wide in offer.paths) for path in rule.paths)


def hosts_meet(first: str, second: str) -> bool:
    """Whether some host is meant by both patterns."""
    return _host_is_within(first, second) or _host_is_within(second, first)


def _host_is_within(host: str, pattern: str) -> bool:
    if pattern in (host, ANY_HOST):
        return True
    if not pattern.startswith(SUFFIX):
        return False
    return is_below(host.removeprefix(SUFFIX), pattern.removeprefix(SUFFIX))
