"""What the organisation offers: a request and a grant stay within it."""

from typing import Any

import pytest

from cloche.wire.egress import EgressRule
from cloche.wire.errors import ClocheError
from cloche_server.policy.model import Effect
from tests.unit.policy.policies import organisation, policy, rule, to


@pytest.mark.req("POL-1")
@pytest.mark.parametrize(
    ("asked", "effect"),
    [
        ("api.example.com", None),
        ("api.example.com:443", Effect.ALLOW),
        ({"host": "api.example.com", "ports": [443], "methods": ["GET"]}, Effect.ALLOW),
        ("x.wide.example.com", Effect.ALLOW),
        ("*.x.wide.example.com", Effect.ALLOW),
        ("*.wide.example.com", Effect.ALLOW),
        ("wide.example.com", None),
        ("*.example.com", None),
        ("x.wide.example.com:8080", None),
        ("db.example.com:5432", Effect.ALLOW),
        ({"host": "db.example.com", "ports": [5432], "protocol": "web"}, Effect.ALLOW),
        ("db.example.com:5433", None),
        ("odd.example.com:8443", None),
        ({"host": "odd.example.com", "ports": [8443], "protocol": "web"}, Effect.ALLOW),
        ("asked.example.com", Effect.ASK),
        ({"host": "seen.example.com", "methods": ["GET"], "paths": ["/repos/x/**"]}, Effect.ALLOW),
        ({"host": "seen.example.com", "methods": ["POST"], "paths": ["/repos/x"]}, None),
        ({"host": "seen.example.com", "methods": ["GET"], "paths": ["/x"]}, None),
        ({"host": "seen.example.com", "methods": ["GET"]}, None),
        ({"host": "seen.example.com"}, None),
        ("auto.example.com", Effect.ALLOW),
        ("deny:anything.example", Effect.DENY),
        ("preset:some", None),
    ],
)
def test_a_request_stays_within_the_offer(asked: Any, effect: Effect | None) -> None:
    seen = EgressRule(host="seen.example.com", methods=["GET", "HEAD"], paths=["/repos/**"])
    odd = EgressRule(host="odd.example.com", ports=[8443], protocol="web")
    offer = ["api.example.com:443", "*.wide.example.com", "db.example.com:5432", "ask:asked.example.com", seen, odd]
    org = organisation(allow=["auto.example.com"], offer=offer)
    if effect is None:
        with pytest.raises(ClocheError) as refused:
            policy(asked, org=org)
        assert refused.value.code == "policy_refused"
        assert "egress[0]" in refused.value.message
    else:
        assert policy(asked, org=org).asked[0].effect is effect


@pytest.mark.req("POL-1")
def test_not_offered_is_said() -> None:
    org = organisation(offer=["*.example.com", "a.example"])
    assert policy(org=org).connect(to("b.example.com:443")).code == "no_rule"
    assert policy(org=org).connect(to("a.example:443")).code == "no_rule"
    assert policy(org=org).connect(to("other.example:443")).code == "not_offered"


@pytest.mark.req("POL-1")
def test_an_offer_that_intercepts_makes_the_rule_intercept() -> None:
    org = organisation(offer=[EgressRule(host="a.example", intercept=True)])
    assert policy("a.example", org=org).connect(to("a.example:443")).intercept


@pytest.mark.req("NET-3")
def test_grants_come_and_go() -> None:
    org = organisation(deny=["bad.example"], offer=["*.example.com", "bad.example"])
    before = policy(org=org)
    granted = before.with_grant(rule("a.example.com", "grant:1")).with_grant(rule("bad.example", "grant:2"))
    assert granted.connect(to("a.example.com:443")).rule == "grant:1"
    assert granted.connect(to("bad.example:443")).code == "denied_by_rule"
    assert granted.digest != before.digest
    after = granted.without("grant:1").without("grant:2")
    assert after.connect(to("a.example.com:443")).effect is Effect.DENY
    assert after == before
    assert after.digest == before.digest
    with pytest.raises(ClocheError) as refused:
        before.with_grant(rule("other.example", "grant:3"))
    assert refused.value.code == "policy_refused"
