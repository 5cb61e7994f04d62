"""What holds for every policy, whatever its rules."""

from dataclasses import replace
from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.wire.egress import EgressRule
from cloche.wire.errors import ClocheError
from cloche_server.policy.decide import Policy, effective
from cloche_server.policy.document import Organisation
from cloche_server.policy.index import Index, is_below
from cloche_server.policy.model import Carries, Effect, Rule, Target
from tests.unit.policy.policies import organisation, policy, presets, rule

LABELS = st.sampled_from(["a", "b", "evil", "allowed", "xn--bcher-kva"])
NAMES = st.lists(LABELS, min_size=2, max_size=4).map(".".join)
HOSTS = NAMES | NAMES.map("*.".__add__) | st.sampled_from(["8.8.8.8", "10.0.0.7", "[2606:4700::1111]"])
PORTS = st.sampled_from([80, 443, 22, 8443])
METHODS = st.sampled_from(["GET", "POST", "DELETE"])
PATHS = st.sampled_from(["/", "/a", "/a/b", "/a/../b", "/a%2fb", "/c/d/e", "//x", "*", "/%61"])
PATTERNS = st.sampled_from(["/**", "/a", "/a/*", "/a/**", "/c/**/e"])
EFFECTS = st.sampled_from(["allow", "ask", "deny"])


@st.composite
def asked(draw: st.DrawFn, effects: st.SearchStrategy[str] = EFFECTS) -> EgressRule:
    web = draw(st.booleans())
    return EgressRule(
        effect=draw(effects),  # type: ignore[arg-type]
        host=draw(HOSTS),
        ports=draw(st.none() | st.lists(PORTS, min_size=1, max_size=3, unique=True)),
        protocol="web" if web else None,
        methods=draw(st.none() | st.lists(METHODS, min_size=1, max_size=2, unique=True)) if web else None,
        paths=draw(st.none() | st.lists(PATTERNS, min_size=1, max_size=2)) if web else None,
        intercept=web and draw(st.booleans()),
    )


RULES = st.lists(asked(), max_size=6)
ADDRESSES = st.sampled_from(["8.8.8.8", "10.0.0.7", "9.9.9.9"])
TARGETS = st.builds(Target, NAMES, PORTS) | st.builds(
    lambda text, port: Target(text, port, ip_address(text)), ADDRESSES, PORTS
)
ORGANISATIONS = st.builds(
    lambda deny, allow, default, intercept: organisation(deny=deny, allow=allow, default=default, intercept=intercept),
    RULES,
    st.lists(asked(st.sampled_from(["allow", "ask"])), max_size=3),
    st.sampled_from([Effect.DENY, Effect.ASK]),
    st.sampled_from(["needed", "always"]),
)


def made(org: Organisation, rules: list[EgressRule]) -> Policy:
    return policy(*rules, org=org)


@pytest.mark.req("NET-2")
@given(TARGETS, METHODS, PATHS, st.sampled_from(["needed", "always"]))
def test_without_rules_nothing_is_allowed(target: Target, method: str, path: str, intercept: Any) -> None:
    empty = policy(org=Organisation(intercept=intercept))
    assert empty.connect(target).effect is Effect.DENY
    assert empty.request(target, method, path).effect is Effect.DENY
    assert empty.resolvable(target.host) == ()


@pytest.mark.req("NET-3")
@given(ORGANISATIONS, RULES, TARGETS, st.randoms())
def test_a_denial_beats_everything_whatever_the_order(
    org: Organisation, rules: list[EgressRule], target: Target, random: Any
) -> None:
    host = f"[{target.host}]" if ":" in target.host else target.host
    shuffled = [*rules, EgressRule(effect="deny", host=host)]
    random.shuffle(shuffled)
    mine = made(org, shuffled)
    assert mine.connect(target).code == "denied_by_rule"
    for method in ("GET", "POST"):
        assert mine.request(target, method, "/a").effect is Effect.DENY
    assert mine.resolvable(target.host) == ()


@pytest.mark.req("POL-1")
@given(ORGANISATIONS, RULES, RULES, asked(st.sampled_from(["allow", "ask"])), TARGETS, METHODS, PATHS)
def test_no_lower_tier_opens_what_the_organisation_denies(
    org: Organisation,
    before: list[EgressRule],
    after: list[EgressRule],
    grant: EgressRule,
    target: Target,
    method: str,
    path: str,
) -> None:
    closed = Policy(replace(org, allow=(), default=Effect.DENY, offer=None))
    opened = made(org, [*before, *after]).with_grant(granted(grant))
    if any(each.rule for each in _denials(closed, target, method, path)):
        assert opened.request(target, method, path).effect is Effect.DENY


def granted(grant: EgressRule) -> Rule:
    return rule(grant.model_copy(update={"ports": [443], "protocol": "web"}), "grant:1")


def _denials(closed: Policy, target: Target, method: str, path: str) -> list[Any]:
    """What the organisation's own denials say of this request, when everything else is allowed."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    everything = replace(closed, asked=(rule({"host": host, "ports": [target.port], "protocol": "web"}, "all"),))
    decision = everything.request(target, method, path)
    return [decision] if decision.code == "denied_by_rule" else []


@pytest.mark.req("NET-3")
@given(ORGANISATIONS, RULES, TARGETS, METHODS, PATHS)
def test_a_request_is_never_allowed_where_its_connection_is_not(
    org: Organisation, rules: list[EgressRule], target: Target, method: str, path: str
) -> None:
    mine = made(org, rules)
    connection = mine.connect(target)
    request = mine.request(target, method, path)
    if connection.effect is Effect.DENY:
        assert request.effect is Effect.DENY
    if request.effect is Effect.ALLOW:
        assert connection.effect is not Effect.DENY
        assert connection.effect is Effect.ALLOW or request.rule != connection.rule
    if connection.effect is not Effect.DENY and target.address is None:
        assert target.port in mine.resolvable(target.host)


@pytest.mark.req("NET-5")
@given(ORGANISATIONS, RULES, TARGETS, st.sampled_from([(), ("a.b",), ("*.evil.b",)]))
def test_what_is_said_of_the_whole_holds_for_each_connection(
    org: Organisation, rules: list[EgressRule], target: Target, secrets: tuple[str, ...]
) -> None:
    mine = policy(*rules, org=org, secrets=secrets)
    decision = mine.connect(target)
    if decision.effect is Effect.DENY or decision.carries is Carries.HTTP:
        return
    if decision.intercept:
        assert mine.needs_interception
        assert decision.carries is not Carries.ANY
    else:
        assert mine.fronting == "possible"


@pytest.mark.req("NET-3")
@given(NAMES, NAMES)
def test_a_suffix_matches_only_at_a_border_of_labels(name: str, suffix: str) -> None:
    index = Index([rule(f"*.{suffix}")], any_host_takes_addresses=False)
    found = bool(index.of(Target(name, 443)))
    labels, below = name.split("."), suffix.split(".")
    assert found is (len(labels) > len(below) and labels[-len(below) :] == below)
    assert found is is_below(name, suffix)
    assert not index.of(Target("x" + suffix, 443))
    assert index.of(Target("x." + suffix, 443))


@pytest.mark.req("NET-3")
def test_a_suffix_never_matches_an_address() -> None:
    """No such rule can be asked for; if there were one, it would still not match."""
    index = Index([Rule("x", Effect.ALLOW, "*.0.0.7", frozenset({443}))], any_host_takes_addresses=True)
    assert not index.of(Target("10.0.0.7", 443, ip_address("10.0.0.7")))


@pytest.mark.req("NET-3")
@given(RULES, TARGETS, METHODS, PATHS)
def test_the_index_decides_like_a_walk_through_all_rules(
    rules: list[EgressRule], target: Target, method: str, path: str
) -> None:
    mine = made(Organisation(), rules)
    assert mine.connect(target).effect is _by_walking(mine, target)


def _by_walking(mine: Policy, target: Target) -> Effect:
    def speaks(each: Rule) -> bool:
        if each.host.startswith("*."):
            host = target.address is None and target.host.endswith(each.host[1:])
        else:
            host = each.host == target.host
        return host and (target.port in each.ports or not each.ports)

    fitting = [each for each in mine.rules if speaks(each)]
    whole = [each.methods is None and each.paths is None for each in fitting]
    if any(each.effect is Effect.DENY and is_whole for each, is_whole in zip(fitting, whole, strict=True)):
        return Effect.DENY
    permits = [each for each in fitting if each.effect is not Effect.DENY]
    if not permits:
        return Effect.DENY
    first = permits[0]
    return first.effect if first.methods is None and first.paths is None else Effect.ALLOW


@pytest.mark.req("POL-1")
@given(RULES, st.lists(asked(st.sampled_from(["allow", "ask"])), max_size=4), TARGETS, METHODS, PATHS)
def test_a_request_never_gets_more_than_is_offered(
    rules: list[EgressRule], offer: list[EgressRule], target: Target, method: str, path: str
) -> None:
    org = organisation(offer=offer)
    try:
        mine = made(org, rules)
    except ClocheError:
        return
    all_offered = Policy(Organisation(), tuple(each for each in org.offer or ()))
    if mine.request(target, method, path).effect is Effect.ALLOW:
        assert all_offered.request(target, method, path).code in ("allowed", "ask", "path_refused")


@given(RULES)
def test_a_policy_is_the_same_made_twice(rules: list[EgressRule]) -> None:
    first, second = (effective(Organisation(), rules, presets=presets) for _ in range(2))
    assert first == second
    assert first.digest == second.digest
