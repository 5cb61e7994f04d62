"""From what somebody asked for to rules that can be compared: checked, normal, each with an id."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal

from pydantic import ValidationError

from cloche.wire.egress import Asked, EgressRule
from cloche.wire.errors import ClocheError, error
from cloche_server.policy.model import WEB_PORTS, Effect, Rule
from cloche_server.policy.names import BadName, host_and_port, normal_host
from cloche_server.policy.paths import BadPattern, check_pattern

if TYPE_CHECKING:
    from cloche_server.policy.presets import Preset

ASKED_MAX: Final = 500
"""How many rules one request may name, and how many may come of them."""
ANY_HOST: Final = "*"
SUFFIX: Final = "*."
SUFFIX_LABELS_MIN: Final = 2
"""`*.com` would be half of the world; a denial may say it."""

_EFFECTS: Final[dict[str, Literal["allow", "ask", "deny"]]] = {"allow": "allow", "ask": "ask", "deny": "deny"}


def rules_of(asked: Sequence[Asked], *, prefix: str, presets: Callable[[str], Preset], source: str) -> tuple[Rule, ...]:
    """In the order given; ids are `egress[0]`, `egress[1]/python-packages[2]`. `policy_invalid` names what is wrong."""
    if len(asked) > ASKED_MAX:
        raise _invalid(prefix, f"there are more than {ASKED_MAX} rules")
    found: list[Rule] = []
    for number, each in enumerate(asked):
        found += rules_of_one(each, rule_id=f"{prefix}[{number}]", presets=presets, source=source)
        if len(found) > ASKED_MAX:
            raise _invalid(prefix, f"with its presets it comes to more than {ASKED_MAX} rules")
    return tuple(found)


def rules_of_one(
    asked: Asked, *, rule_id: str, presets: Callable[[str], Preset], source: str, effect: Effect | None = None
) -> tuple[Rule, ...]:
    """One rule can be several: a preset is a list, and web and other ports are apart. `effect` goes before its own."""
    try:
        rule = parse_short(asked) if isinstance(asked, str) else asked
    except ClocheError as refused:
        raise _invalid(rule_id, refused.message) from None
    if effect is not None:
        rule = rule.model_copy(update={"effect": effect.value})
    if (rule.host is None) == (rule.preset is None):
        raise _invalid(rule_id, "it needs either a host or a preset")
    if rule.preset is not None:
        return tuple(_of_preset(rule, rule.preset, rule_id, presets))
    return tuple(_of_host(rule, rule_id, source))


def parse_short(text: str) -> EgressRule:
    """`api.example.com`, `*.example.com:8443`, `preset:python-packages`, each with `ask:` or `deny:` before it."""
    word, colon, rest = text.partition(":")
    effect = _EFFECTS.get(word, "allow") if colon else "allow"
    if not (colon and word in _EFFECTS):
        rest = text
    kind, colon, name = rest.partition(":")
    try:
        if colon and kind == "preset":
            return EgressRule(effect=effect, preset=name)
        return EgressRule(effect=effect, host=rest)
    except ValidationError:
        raise error("policy_invalid", f"{shown(text)} is not HOST, HOST:PORT or preset:NAME.") from None


def shown(text: str, chars_max: int = 120) -> str:
    """Text of somebody else in a message: no control character, no other script, not without end."""
    return "'" + text[:chars_max].encode("unicode_escape").decode() + ("…'" if len(text) > chars_max else "'")


def rule_text(rule: Rule) -> str:
    """For a person: `allow api.example.com 443 GET /repos/**`."""
    words = [rule.effect.value, rule.host, ",".join(str(port) for port in sorted(rule.ports)) or "every port"]
    if rule.tcp:
        words.append("tcp")
    if rule.methods is not None:
        words.append(",".join(sorted(rule.methods)))
    words += rule.paths or ()
    if rule.intercept:
        words.append("intercepted")
    return " ".join(words)


def _of_preset(rule: EgressRule, name: str, rule_id: str, presets: Callable[[str], Preset]) -> Iterator[Rule]:
    if rule.ports is not None or rule.protocol is not None:
        raise _invalid(rule_id, "a preset has ports and protocol of its own")
    for number, each in enumerate(presets(name).rules):
        update = {
            "effect": rule.effect,
            "methods": each.methods if rule.methods is None else rule.methods,
            "paths": each.paths if rule.paths is None else rule.paths,
            "intercept": each.intercept or rule.intercept,
        }
        narrowed = each.model_copy(update=update)
        yield from _of_host(narrowed, f"{rule_id}/{name}[{number}]", f"preset {name}")


def _of_host(rule: EgressRule, rule_id: str, source: str) -> Iterator[Rule]:
    effect = Effect(rule.effect)
    host, port = pattern_of(rule.host or "", rule_id, effect)
    methods, paths = _seen(rule, rule_id)
    if port is not None and rule.ports is not None:
        raise _invalid(rule_id, "it names ports twice: behind the host and as `ports`")
    named = frozenset(rule.ports or ()) if port is None else frozenset({port})
    if rule.ports is not None and not rule.ports:
        raise _invalid(rule_id, "`ports` is empty: leave it out for 443 and 80")
    sees = methods is not None or paths is not None or rule.intercept
    if rule.protocol == "tcp" and not named:
        raise _invalid(rule_id, "`tcp` needs a port: any bytes may flow only where a rule names host and port")
    if rule.protocol == "tcp" and sees:
        raise _invalid(rule_id, "methods, paths and interception need `web`: nothing in `tcp` can be seen")
    for ports, tcp in _kinds(rule, named, sees=sees):
        yield Rule(rule_id, effect, host, ports, tcp, methods, paths, rule.intercept, source)


def _kinds(rule: EgressRule, named: frozenset[int], *, sees: bool) -> list[tuple[frozenset[int], bool]]:
    """Ports, and whether any bytes may flow there. A denial that names no port is for all of them: the empty set."""
    if not named:
        everything = rule.effect == "deny" and not sees
        return [(frozenset() if everything else WEB_PORTS, False)]
    if rule.protocol is not None or sees:
        return [(named, rule.protocol == "tcp")]
    web = named & WEB_PORTS
    return [(ports, tcp) for ports, tcp in ((web, False), (named - web, True)) if ports]


def pattern_of(text: str, rule_id: str, effect: Effect) -> tuple[str, int | None]:
    """The normal host, `*.suffix` or `*`, and the port behind it."""
    try:
        name, port = _split(text)
        if name == ANY_HOST:
            if effect is Effect.ALLOW:
                raise _invalid(rule_id, "`*` alone can be asked for or denied, never allowed: name the hosts")
            return ANY_HOST, port
        if not name.startswith(SUFFIX):
            return normal_host(name)[0], port
        suffix, address = normal_host(name.removeprefix(SUFFIX))
    except BadName as bad:
        raise _invalid(rule_id, f"{shown(text)}: {bad}") from None
    if address is not None:
        raise _invalid(rule_id, f"{shown(text)}: an address has no names below it")
    if effect is not Effect.DENY and suffix.count(".") + 1 < SUFFIX_LABELS_MIN:
        raise _invalid(rule_id, f"{shown(text)}: name at least {SUFFIX_LABELS_MIN} parts behind `*.`")
    return SUFFIX + suffix, port


def _split(text: str) -> tuple[str, int | None]:
    bare_version_6 = text.count(":") > 1 and not text.startswith("[")
    if bare_version_6 or ":" not in text or text.endswith("]"):
        return text, None
    return host_and_port(text)


def _seen(rule: EgressRule, rule_id: str) -> tuple[frozenset[str] | None, tuple[str, ...] | None]:
    if rule.methods is not None and not rule.methods:
        raise _invalid(rule_id, "`methods` is empty: leave it out for all of them")
    if rule.paths is not None and not rule.paths:
        raise _invalid(rule_id, "`paths` is empty: leave it out for all of them")
    for pattern in rule.paths or ():
        try:
            check_pattern(pattern)
        except BadPattern as bad:
            raise _invalid(rule_id, f"{shown(pattern)}: {bad}") from None
    methods = None if rule.methods is None else frozenset(rule.methods)
    return methods, None if rule.paths is None else tuple(rule.paths)


def _invalid(where: str, why: str) -> ClocheError:
    return error("policy_invalid", f"{where}: {why.rstrip('.')}.", detail={"rule": where})
