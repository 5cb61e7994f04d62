"""A sandbox's policy as its record keeps it, so that a new daemon decides exactly as the last one did.

Of the organisation's file this is what decides: its rules, its default, whether all is intercepted. Addresses that it excepts,
name servers and times are the file's as it is now, for every gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cloche_server.policy.decide import Policy
from cloche_server.policy.document import Organisation
from cloche_server.policy.model import Effect, Rule
from cloche_server.policy.rules import rule_text


def stored(policy: Policy) -> dict[str, Any]:
    organisation = policy.organisation
    return {
        "digest": organisation.digest,
        "deny": rows(organisation.deny),
        "allow": rows(organisation.allow),
        "offer": None if organisation.offer is None else rows(organisation.offer),
        "default": organisation.default.value,
        "intercept": organisation.intercept,
        "asked": rows(policy.asked),
        "bound": sorted(policy.intercept_hosts),
    }


def restored(found: Mapping[str, Any]) -> Policy:
    """Without its grants. Raises KeyError, ValueError, TypeError for what `stored` did not make."""
    organisation = Organisation(
        digest=found["digest"],
        deny=rules(found["deny"]),
        allow=rules(found["allow"]),
        offer=None if found["offer"] is None else rules(found["offer"]),
        default=Effect(found["default"]),
        intercept="always" if found["intercept"] == "always" else "needed",
    )
    return Policy(organisation, rules(found["asked"]), intercept_hosts=frozenset(found["bound"]))


def shown(policy: Policy) -> list[str]:
    """For the sandbox's view: each rule, in the order in which they are asked."""
    return [f"{rule.id}: {rule_text(rule)}" for rule in policy.rules]


def rows(rules: Sequence[Rule]) -> list[dict[str, Any]]:
    return [
        {
            "id": rule.id,
            "effect": rule.effect.value,
            "host": rule.host,
            "ports": sorted(rule.ports),
            "tcp": rule.tcp,
            "methods": None if rule.methods is None else sorted(rule.methods),
            "paths": None if rule.paths is None else list(rule.paths),
            "intercept": rule.intercept,
            "source": rule.source,
        }
        for rule in rules
    ]


def rules(found: Sequence[Mapping[str, Any]]) -> tuple[Rule, ...]:
    return tuple(
        Rule(
            id=each["id"],
            effect=Effect(each["effect"]),
            host=each["host"],
            ports=frozenset(each["ports"]),
            tcp=each["tcp"],
            methods=None if each["methods"] is None else frozenset(each["methods"]),
            paths=None if each["paths"] is None else tuple(each["paths"]),
            intercept=each["intercept"],
            source=each["source"],
        )
        for each in found
    )
