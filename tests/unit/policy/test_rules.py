"""From what is asked for to rules: forms, defaults, ids, and what is refused by name."""

from typing import Any

import pytest

from cloche.wire.egress import EgressRule
from cloche.wire.errors import ClocheError
from cloche_server.policy.model import WEB_PORTS, Effect
from cloche_server.policy.rules import ASKED_MAX, parse_short, rule_text, rules_of
from tests.unit.policy.policies import presets, rule


@pytest.mark.parametrize(
    ("text", "effect", "host", "preset"),
    [
        ("api.example.com", "allow", "api.example.com", None),
        ("*.example.com:8443", "allow", "*.example.com:8443", None),
        ("preset:python-packages", "allow", None, "python-packages"),
        ("ask:hooks.example.com", "ask", "hooks.example.com", None),
        ("deny:*.example.com", "deny", "*.example.com", None),
        ("allow:a.example", "allow", "a.example", None),
        ("ask:preset:git-hosts", "ask", None, "git-hosts"),
        ("ask:a.example:8443", "ask", "a.example:8443", None),
        ("[::1]:80", "allow", "[::1]:80", None),
        ("ask", "allow", "ask", None),
    ],
)
def test_short_form(text: str, effect: str, host: str | None, preset: str | None) -> None:
    found = parse_short(text)
    assert (found.effect, found.host, found.preset) == (effect, host, preset)


@pytest.mark.parametrize("text", ["preset:", "preset:A B", "ask:", "preset:x:y"])
def test_bad_short_form(text: str) -> None:
    with pytest.raises(ClocheError) as refused:
        parse_short(text)
    assert refused.value.code == "policy_invalid"


@pytest.mark.req("NET-5")
@pytest.mark.parametrize(
    ("asked", "host", "ports", "tcp"),
    [
        ("Api.Example.com.", "api.example.com", WEB_PORTS, False),
        ("api.example.com:443", "api.example.com", {443}, False),
        ("api.example.com:5432", "api.example.com", {5432}, True),
        ("*.Example.com", "*.example.com", WEB_PORTS, False),
        ("10.0.0.7:5432", "10.0.0.7", {5432}, True),
        ("[FD00::1]:80", "fd00::1", {80}, False),
        ("fd00::1", "fd00::1", WEB_PORTS, False),
        ("bücher.example", "xn--bcher-kva.example", WEB_PORTS, False),
        ({"host": "a.example", "ports": [8443], "protocol": "web"}, "a.example", {8443}, False),
        ({"host": "a.example", "ports": [443], "protocol": "tcp"}, "a.example", {443}, True),
        ({"host": "a.example", "ports": [8443], "methods": ["GET"]}, "a.example", {8443}, False),
        ({"host": "a.example", "effect": "deny"}, "a.example", set(), False),
        ({"host": "a.example", "effect": "deny", "ports": [25]}, "a.example", {25}, True),
        ({"host": "a.example", "effect": "deny", "paths": ["/x"]}, "a.example", WEB_PORTS, False),
        ("deny:*", "*", set(), False),
        ("ask:*", "*", WEB_PORTS, False),
        ("deny:*.com", "*.com", set(), False),
    ],
)
def test_one_rule(asked: Any, host: str, ports: set[int], tcp: bool) -> None:
    found = rule(asked)
    assert (found.host, found.ports, found.tcp) == (host, frozenset(ports), tcp)


def test_web_and_other_ports_are_two_rules_with_one_id() -> None:
    found = rules_of([EgressRule(host="a.example", ports=[443, 22])], prefix="egress", presets=presets, source="x")
    assert [(each.id, each.ports, each.tcp) for each in found] == [
        ("egress[0]", frozenset({443}), False),
        ("egress[0]", frozenset({22}), True),
    ]


@pytest.mark.req("NET-3")
def test_ids_and_sources() -> None:
    asked = ["a.example", EgressRule(preset="some", effect="ask", methods=["GET"], paths=["/x/**"])]
    found = rules_of(asked, prefix="egress", presets=presets, source="the request")
    assert [each.id for each in found] == ["egress[0]", "egress[1]/some[0]", "egress[1]/some[1]"]
    assert [each.source for each in found] == ["the request", "preset some", "preset some"]
    assert {each.effect for each in found[1:]} == {Effect.ASK}
    assert found[2].methods == {"GET"}
    assert found[2].paths == ("/x/**",)
    assert rule_text(found[2]) == "ask two.example 8080 GET /x/**"


@pytest.mark.req("NET-3")
@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (EgressRule(), "either a host or a preset"),
        (EgressRule(host="a.example", preset="some"), "either a host or a preset"),
        ("*", "never allowed"),
        ("*.com", "at least 2 parts"),
        ("ask:*.com", "at least 2 parts"),
        ("*.10.0.0.1", "no names below"),
        ("*.*.example.com", "no name of a host"),
        ("a*.example.com", "no name of a host"),
        ("a.example@b.example", "user before"),
        ("http://a.example", "no name of a host"),
        ("a.example/path", "no name of a host"),
        ("2852039166", "is a number"),
        ("127.1:80", "is a number"),
        ("a.example:0", "port"),
        ("a.example:http", "port"),
        ("a.example:70000", "port"),
        (EgressRule(host="a.example:80", ports=[80]), "ports twice"),
        (EgressRule(host="a.example", ports=[]), "`ports` is empty"),
        (EgressRule(host="a.example", methods=[]), "`methods` is empty"),
        (EgressRule(host="a.example", paths=[]), "`paths` is empty"),
        (EgressRule(host="a.example", paths=["/a**"]), "whole segments"),
        (EgressRule(host="a.example", paths=["/a/../b"]), "dot segment"),
        (EgressRule(host="a.example", protocol="tcp"), "needs a port"),
        (EgressRule(host="a.example:22", protocol="tcp", methods=["GET"]), "nothing in `tcp`"),
        (EgressRule(host="a.example:22", protocol="tcp", intercept=True), "nothing in `tcp`"),
        (EgressRule(preset="some", ports=[1]), "ports and protocol of its own"),
        ("\x1b[31m.example", "no name of a host"),
    ],
)
def test_refused_by_name(asked: Any, why: str) -> None:
    with pytest.raises(ClocheError) as refused:
        rules_of(["fine.example", asked], prefix="egress", presets=presets, source="x")
    assert refused.value.code == "policy_invalid"
    assert refused.value.message.startswith("egress[1]: ")
    assert why in refused.value.message
    assert refused.value.message.isprintable()


def test_not_too_many() -> None:
    many = ["a.example"] * ASKED_MAX
    assert len(rules_of(many, prefix="e", presets=presets, source="")) == ASKED_MAX
    for too_many in ([*many, "a.example"], [*many[2:], EgressRule(preset="some"), EgressRule(preset="some")]):
        with pytest.raises(ClocheError, match="more than"):
            rules_of(too_many, prefix="e", presets=presets, source="")
