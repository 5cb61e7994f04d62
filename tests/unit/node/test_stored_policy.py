"""A policy that went through a record is the same policy: same digest, same decisions, same words."""

import json
from pathlib import Path

import pytest

from cloche.wire.egress import EgressRule
from cloche_server.node import stored_policy
from cloche_server.policy.decide import Policy, effective
from cloche_server.policy.document import Organisation, load
from cloche_server.policy.names import target
from cloche_server.policy.presets import Presets

pytestmark = pytest.mark.req("POL-1")

FILE = """
version: 1
default: ask
intercept: always
deny: ["*.evil.example", "10.0.0.1"]
allow: ["always.example"]
offer: ["a.example", "c.example", "b.example:5432", "bound.example"]
"""
ASKED = ["a.example", EgressRule(host="b.example", ports=[5432]), EgressRule(host="c.example", paths=["/x/**"])]
TARGETS = [("a.example", 443), ("x.evil.example", 443), ("b.example", 5432), ("c.example", 443), ("nowhere.test", 443)]


def through_a_record(policy: Policy) -> Policy:
    return stored_policy.restored(json.loads(json.dumps(stored_policy.stored(policy))))


def test_the_same_policy_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(FILE)
    policy = effective(load(path), ASKED, presets=Presets(), intercept_hosts=["bound.example"])
    again = through_a_record(policy)
    assert again.digest == policy.digest
    assert again.rules == policy.rules
    assert (again.fronting, again.needs_interception) == (policy.fronting, policy.needs_interception)
    for host, port in TARGETS:
        assert again.connect(target(host, port)) == policy.connect(target(host, port))
    assert again.request(target("c.example", 443), "GET", "/y") == policy.request(target("c.example", 443), "GET", "/y")
    assert stored_policy.shown(again) == stored_policy.shown(policy)


def test_the_one_that_allows_nothing_comes_back_too() -> None:
    again = through_a_record(Policy(Organisation()))
    assert again == Policy(Organisation())
    assert again.connect(target("a.example", 443)).code == "no_rule"


def test_what_was_not_stored_by_us_is_no_policy() -> None:
    stored = stored_policy.stored(Policy(Organisation()))
    for broken in ({}, {**stored, "default": "perhaps"}, {**stored, "asked": [{"id": "x"}]}):
        with pytest.raises((KeyError, ValueError)):
            stored_policy.restored(broken)
