"""Rules found by host without asking each: exact names and addresses by table, suffixes by walking up the labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cloche_server.policy.model import Rule, Target
from cloche_server.policy.paths import Pattern, compiled
from cloche_server.policy.rules import ANY_HOST, SUFFIX


@dataclass(frozen=True, slots=True)
class Placed:
    """A rule and its place in the order in which rules are asked."""

    place: int
    rule: Rule
    patterns: tuple[Pattern, ...] | None
    """Of its paths, ready."""

    def sees(self, method: str, segments: tuple[str, ...]) -> bool:
        """Whether it speaks of this request, to a host and port that it speaks of."""
        rule = self.rule
        if rule.methods is not None and method not in rule.methods:
            return False
        return self.patterns is None or any(pattern.matches(segments) for pattern in self.patterns)


def speaks_of(rule: Rule, port: int) -> bool:
    """A denial without ports is for all of them."""
    return port in rule.ports or not rule.ports


def is_below(name: str, suffix: str) -> bool:
    """Whether `name` is a name below `suffix`: at a border of labels, and not the suffix itself."""
    return name.endswith("." + suffix)


class Index:
    """Of one ordered list of rules."""

    def __init__(self, rules: Iterable[Rule], *, any_host_takes_addresses: bool) -> None:
        self._exact: dict[str, list[Placed]] = {}
        self._below: dict[str, list[Placed]] = {}
        self._any: list[Placed] = []
        self._addresses_too = any_host_takes_addresses
        for place, rule in enumerate(rules):
            patterns = None if rule.paths is None else tuple(compiled(each) for each in rule.paths)
            placed = Placed(place, rule, patterns)
            if rule.host == ANY_HOST:
                self._any.append(placed)
            elif rule.host.startswith(SUFFIX):
                self._below.setdefault(rule.host.removeprefix(SUFFIX), []).append(placed)
            else:
                self._exact.setdefault(rule.host, []).append(placed)

    def of(self, target: Target) -> list[Placed]:
        """Every rule for this host, in order, whatever its ports."""
        return self.of_host(target.host, is_address=target.address is not None)

    def of_host(self, host: str, *, is_address: bool = False) -> list[Placed]:
        found = self._exact.get(host, _NONE)
        parts = 1 if found else 0
        if not is_address and self._below:
            at = host.find(".")
            while at >= 0:
                below = self._below.get(host[at + 1 :])
                if below is not None:
                    found = found + below
                    parts += 1
                at = host.find(".", at + 1)
        if self._any and (not is_address or self._addresses_too):
            found = found + self._any
            parts += 1
        return found if parts < 2 else sorted(found, key=_place)


_NONE: list[Placed] = []


def _place(placed: Placed) -> int:
    return placed.place
