"""What one sandbox may reach: the effective policy, and its decision about a connection or a request. Pure, fast.

Order: denials, the organisation's first; then the first rule that matches, among those of the request, the grants,
the organisation's `allow`; then the organisation's default. A rule with methods or paths cannot decide a
connection: it lets the connection through on condition that each request in it is seen and decided (`intercept`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv6Address
from typing import Literal

from cloche.wire.egress import Asked
from cloche_server.policy import offers
from cloche_server.policy.addresses import embedded
from cloche_server.policy.digests import digest_of
from cloche_server.policy.document import Organisation
from cloche_server.policy.index import Index, Placed, speaks_of
from cloche_server.policy.model import HTTP_PORT, TLS_PORT, WEB_PORTS, Address, Carries, Decision, Effect, Rule, Target
from cloche_server.policy.paths import refused, split
from cloche_server.policy.presets import Preset
from cloche_server.policy.rules import ANY_HOST, pattern_of, rule_text, rules_of, shown

DEFAULT_RULE = "default"


@dataclass(frozen=True)
class Policy:
    """Of one sandbox. Never changed: a grant makes another one."""

    organisation: Organisation
    asked: tuple[Rule, ...] = ()
    grants: tuple[Rule, ...] = ()
    intercept_hosts: frozenset[str] = frozenset()
    """Patterns of hosts that the sandbox's secrets are bound to. If there are any, all web connections are seen."""
    digest: str = field(init=False)
    _denies: Index = field(init=False, repr=False, compare=False)
    _permits: Index = field(init=False, repr=False, compare=False)
    _intercepts: Index = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        denies = [rule for rule in self.rules if rule.effect is Effect.DENY]
        permits = [rule for rule in self.rules if rule.effect is not Effect.DENY]
        bound = [Rule("secret", Effect.ALLOW, host, frozenset()) for host in self.intercept_hosts]
        object.__setattr__(self, "_denies", Index(denies, any_host_takes_addresses=True))
        object.__setattr__(self, "_permits", Index(permits, any_host_takes_addresses=False))
        object.__setattr__(self, "_intercepts", Index(bound, any_host_takes_addresses=True))
        object.__setattr__(self, "digest", digest_of(self.organisation.digest, self.rules, self.intercept_hosts))

    @property
    def rules(self) -> tuple[Rule, ...]:
        """In the order in which they are asked, after the denials among them."""
        return (*self.organisation.deny, *self.asked, *self.grants, *self.organisation.allow)

    def connect(self, target: Target) -> Decision:
        """Whether a connection may be made, what it must carry, and whether its requests must be seen."""
        conditional = False
        for placed in self._denies.of(target):
            if speaks_of(placed.rule, target.port):
                if is_whole(placed.rule):
                    return self._denied(placed.rule, target)
                conditional = True
        found = self._permits.of(target)
        first = None
        for placed in found:
            rule = placed.rule
            if target.port not in rule.ports:
                continue
            first = first or rule
            if is_whole(rule):
                effect = rule.effect if rule is first else Effect.ALLOW
                return self._may(first, target, effect, seen=conditional or rule is not first)
        if first is not None:
            return self._may(first, target, Effect.ALLOW, seen=True)
        return self._otherwise(target, found, seen=conditional)

    def request(self, target: Target, method: str, path: str, *, approved: str | None = None) -> Decision:
        """Of one request in a connection. `path` may have its query, which no rule looks at.

        `approved` is the rule under which a person let this connection through: it is not asked again for each request.
        """
        decision = self.connect(target)
        if decision.intercept and decision.effect is not Effect.DENY:
            decision = self._request(target, method.upper(), path.partition("?")[0])
        if decision.effect is Effect.ASK and decision.rule == approved and self._asks_once(approved):
            return replace(decision, effect=Effect.ALLOW, code="allowed")
        return decision

    def address(self, address: Address, port: int) -> Decision | None:
        """A denial that names this address, which a name resolved to, or an address that it carries."""
        carried = embedded(address) if isinstance(address, IPv6Address) else ()
        for each in (address, *carried):
            target = Target(str(each), port, each)
            for placed in self._denies.of_host(target.host, is_address=True):
                rule = placed.rule
                if rule.host != ANY_HOST and speaks_of(rule, port) and is_whole(rule):
                    return self._denied(rule, target)
        return None

    def resolvable(self, name: str) -> tuple[int, ...]:
        """Ports on which some rule could let this name through, web first; () if none."""
        ports: set[int] = set()
        for placed in self._permits.of_host(name):
            ports |= placed.rule.ports
        if self.organisation.default is Effect.ASK:
            ports |= WEB_PORTS
        for placed in self._denies.of_host(name):
            if is_whole(placed.rule):
                ports = {port for port in ports if not speaks_of(placed.rule, port)}
        return tuple(sorted(ports, key=lambda port: (port != TLS_PORT, port != HTTP_PORT, port)))

    def with_grant(self, rule: Rule) -> Policy:
        """`policy_refused` if the organisation's file does not offer it."""
        return replace(self, grants=(*self.grants, offers.narrowed(self.organisation, rule)))

    def without(self, rule_id: str) -> Policy:
        return replace(self, grants=tuple(each for each in self.grants if each.id != rule_id))

    @property
    def sees_all(self) -> bool:
        """Every web connection is intercepted: the file says so, or a placeholder could leave in one unseen."""
        return self.organisation.intercept == "always" or bool(self.intercept_hosts)

    @property
    def fronting(self) -> Literal["possible", "closed"]:
        """Whether some host is reached by tunnels whose content the gate does not see."""
        permits = [rule for rule in self.rules if rule.effect is not Effect.DENY]
        if any(self._is_opaque(rule) for rule in permits):
            return "possible"
        return "possible" if self.organisation.default is Effect.ASK and not self.sees_all else "closed"

    @property
    def needs_interception(self) -> bool:
        """Whether the interceptor and a certificate authority of its own must be there for this sandbox."""
        if self.intercept_hosts:
            return True
        if self.organisation.intercept == "always":
            permits = any(rule.effect is not Effect.DENY and not rule.tcp for rule in self.rules)
            return permits or self.organisation.default is Effect.ASK
        return any(self._must_be_seen(rule) for rule in self.rules)

    def explain(self, target: Target, method: str | None = None, path: str | None = None) -> str:
        """For a person: the decision, the rule that made it, and where that rule comes from."""
        decision = self.connect(target) if method is None else self.request(target, method, path or "/")
        rule = next((each for each in self.rules if each.id == decision.rule), None)
        lines = [f"{decision.effect.value}   {decision.text}"]
        if rule is not None:
            lines.append(f"rule    {rule.id}: {rule_text(rule)}" + (f"   ({rule.source})" if rule.source else ""))
        if decision.intercept:
            lines.append("        each request in the connection is seen and decided")
        lines.append(f"policy  {self.digest}")
        return "\n".join(lines)

    def _request(self, target: Target, method: str, path: str) -> Decision:
        denies = [each for each in self._denies.of(target) if speaks_of(each.rule, target.port)]
        permits = [each for each in self._permits.of(target) if target.port in each.rule.ports]
        with_paths = next((each.rule for each in (*denies, *permits) if each.patterns is not None), None)
        segments: tuple[str, ...] = ()
        if with_paths is not None:
            doubt = refused(path)
            if doubt is not None:
                return self._path_refused(with_paths, target, doubt)
            segments = split(path)
        for placed in denies:
            if placed.sees(method, segments):
                return self._denied(placed.rule, target)
        for placed in permits:
            if placed.sees(method, segments):
                return self._may(placed.rule, target, placed.rule.effect, seen=True)
        return _not_seen(target, method, permits) if permits else self._otherwise(target, [], seen=True)

    def _asks_once(self, rule_id: str) -> bool:
        """Whether that rule decides connections: one with methods or paths asks for each request."""
        return all(is_whole(rule) for rule in self.rules if rule.id == rule_id)

    def _may(self, rule: Rule, target: Target, effect: Effect, *, seen: bool) -> Decision:
        carries = _carries(rule, target.port)
        always = self.sees_all and carries is not Carries.ANY
        intercept = seen or rule.intercept or always or bool(self._intercepts.of(target))
        if intercept and carries is Carries.ANY:
            carries = _web(target.port)
        code = "allowed" if effect is Effect.ALLOW else "ask"
        word = "allows" if effect is Effect.ALLOW else "asks a person before"
        text = f"Rule {rule.id} {word} {target.host}:{target.port}."
        return Decision(effect, rule.id, code, text, carries, intercept, exact=rule.host == target.host)

    def _otherwise(self, target: Target, found: list[Placed], *, seen: bool) -> Decision:
        """No rule is for this host and port."""
        where = f"{_bracketed(target)}:{target.port}"
        if target.address is None and self.organisation.default is Effect.ASK and target.port in WEB_PORTS:
            intercept = seen or self.sees_all
            text = f"No rule allows {where}; the organisation's file says to ask."
            return Decision(Effect.ASK, DEFAULT_RULE, "ask", text, _web(target.port), intercept, exact=False)
        if found:
            ports = ", ".join(
                str(port) for port in sorted(frozenset[int]().union(*(each.rule.ports for each in found)))
            )
            rule = found[0].rule.id
            return _no("port_not_allowed", f"Rule {rule} allows {_bracketed(target)} on port {ports} only.", rule)
        if target.address is not None:
            return _no("needs_name", f"No rule names the address {where}; ask for the host by its name.")
        if not offers.is_offered(self.organisation, target):
            return _no("not_offered", f"No rule allows {where}, and the organisation's file does not offer it.")
        return _no("no_rule", f"No rule allows {where}.")

    def _denied(self, rule: Rule, target: Target) -> Decision:
        text = f"Rule {rule.id} denies {_bracketed(target)}:{target.port}."
        return Decision(Effect.DENY, rule.id, "denied_by_rule", text)

    def _path_refused(self, rule: Rule, target: Target, doubt: str) -> Decision:
        text = f"Rule {rule.id} looks at paths of {target.host}, and this path has {doubt}."
        return Decision(Effect.DENY, rule.id, "path_refused", text, intercept=True)

    def _must_be_seen(self, rule: Rule) -> bool:
        """Whether it makes somebody look into TLS. A denial of requests does only where something is allowed at all."""
        if not rule.needs_plaintext:
            return False
        if rule.effect is not Effect.DENY:
            return rule.intercept or rule.ports != {HTTP_PORT}
        seen = rule.ports - {HTTP_PORT}
        if self.organisation.default is Effect.ASK and seen & WEB_PORTS:
            return True
        permits = (each for each in self.rules if each.effect is not Effect.DENY)
        return any(seen & each.ports and offers.hosts_meet(rule.host, each.host) for each in permits)

    def _is_opaque(self, rule: Rule) -> bool:
        if rule.needs_plaintext or (rule.ports == {HTTP_PORT} and not rule.tcp):
            return False
        if rule.tcp:
            return rule.host not in self.intercept_hosts
        return not self.sees_all


def effective(
    organisation: Organisation,
    asked: Sequence[Asked],
    *,
    presets: Callable[[str], Preset],
    intercept_hosts: Collection[str] = (),
    prefix: str = "egress",
    source: str = "the request",
) -> Policy:
    """`policy_refused` when the request goes beyond what the organisation's file offers."""
    rules = rules_of(asked, prefix=prefix, presets=presets, source=source)
    bound = frozenset(pattern_of(host, "secret", Effect.ALLOW)[0] for host in intercept_hosts)
    return Policy(organisation, tuple(offers.narrowed(organisation, rule) for rule in rules), intercept_hosts=bound)


def is_whole(rule: Rule) -> bool:
    """Whether it speaks of a connection as a whole, not of some requests in it."""
    return rule.methods is None and rule.paths is None


def _not_seen(target: Target, method: str, permits: list[Placed]) -> Decision:
    by_method = all(each.rule.methods is not None and method not in each.rule.methods for each in permits)
    what = f"for {shown(method, 32)}" if by_method else "this path"
    rule = permits[0].rule
    text = f"Rule {rule.id} allows {_bracketed(target)}:{target.port}, but not {what}."
    return Decision(
        Effect.DENY, rule.id, "method_not_allowed" if by_method else "path_not_allowed", text, intercept=True
    )


def _no(code: str, text: str, rule: str = DEFAULT_RULE) -> Decision:
    return Decision(Effect.DENY, rule, code, text)


def _carries(rule: Rule, port: int) -> Carries:
    return Carries.ANY if rule.tcp else _web(port)


def _web(port: int) -> Carries:
    if port == TLS_PORT:
        return Carries.TLS
    return Carries.HTTP if port == HTTP_PORT else Carries.WEB


def _bracketed(target: Target) -> str:
    return f"[{target.host}]" if ":" in target.host else target.host
