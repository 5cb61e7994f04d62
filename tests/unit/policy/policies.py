"""Policies for tests, without files and tools."""

from collections.abc import Collection
from typing import Any

from cloche.wire.egress import Asked, EgressRule
from cloche_server.policy.decide import Policy, effective
from cloche_server.policy.document import Organisation
from cloche_server.policy.model import Effect, Rule, Target
from cloche_server.policy.names import target
from cloche_server.policy.presets import Preset
from cloche_server.policy.rules import rules_of_one


def presets(name: str) -> Preset:
    """One list, `some`."""
    assert name == "some"
    return Preset(
        "some", (EgressRule(host="one.example"), EgressRule(host="two.example", ports=[8080], protocol="web"))
    )


def rule(asked: Asked | dict[str, Any], rule_id: str = "r", effect: Effect | None = None) -> Rule:
    if isinstance(asked, dict):
        asked = EgressRule(**asked)
    found = rules_of_one(asked, rule_id=rule_id, presets=presets, source="a test", effect=effect)
    assert len(found) == 1
    return found[0]


def organisation(
    deny: Collection[Asked] = (),
    allow: Collection[Asked] = (),
    offer: Collection[Asked] | None = None,
    **more: Any,
) -> Organisation:
    def tier(name: str, asked: Collection[Asked], effect: Effect | None = None) -> tuple[Rule, ...]:
        rules = enumerate(asked)
        return tuple(
            found
            for number, each in rules
            for found in rules_of_one(
                each, rule_id=f"{name}[{number}]", presets=presets, source=f"policy.yaml:{number}", effect=effect
            )
        )

    return Organisation(
        deny=tier("deny", deny, Effect.DENY),
        allow=tier("allow", allow),
        offer=None if offer is None else tier("offer", offer),
        **more,
    )


def policy(*asked: Asked | dict[str, Any], org: Organisation | None = None, secrets: Collection[str] = ()) -> Policy:
    rules = [EgressRule(**each) if isinstance(each, dict) else each for each in asked]
    return effective(org or Organisation(), rules, presets=presets, intercept_hosts=secrets)


def to(text: str) -> Target:
    """`HOST`, with 443, or `HOST:PORT`, or `[V6]:PORT`."""
    host, colon, port = text.rpartition(":")
    return target(host, port) if colon else target(text, 443)
