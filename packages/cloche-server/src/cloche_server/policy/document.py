"""The organisation's file, `policy.yaml`: what no request can go beyond. docs/reference/policy.md has the whole form.

Four tiers: `deny` beats everything; `allow` holds for every sandbox unasked; `offer` is what a request may ask for
(without the key: anything); `default` is what happens to the rest: `deny` or `ask`. Strict: an unknown key, a wrong
type or a doubtful value is an error with file and line, and the file as a whole does not hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from pydantic import ValidationError

from cloche.wire import defaults
from cloche.wire.egress import Asked, EgressLimits, EgressRule
from cloche.wire.errors import ClocheError
from cloche_server.policy.model import Address, Effect, Rule
from cloche_server.policy.names import BadName, host_and_port, normal_host
from cloche_server.policy.presets import Preset, Presets
from cloche_server.policy.reading import Table, read_document
from cloche_server.policy.rules import rules_of_one, shown

FILE: Final = "policy.yaml"
VERSION: Final = 1
DNS_PORT: Final = 53
APPROVAL_S_MAX: Final = 3600.0
ATTEMPTS_PER_S_MAX: Final = 10_000
"""What the API takes: the limit where the file names none."""

PresetsOf = Callable[[str], Preset]


@dataclass(frozen=True)
class Webhook:
    """Where questions are sent, and the file of the key that signs them."""

    url: str
    key_file: Path


@dataclass(frozen=True)
class Organisation:
    """The whole file. The defaults are what holds without one: nothing is allowed that is not asked for."""

    digest: str = "built-in"
    deny: tuple[Rule, ...] = ()
    allow: tuple[Rule, ...] = ()
    offer: tuple[Rule, ...] | None = None
    default: Effect = Effect.DENY
    addresses: frozenset[tuple[Address, int | None]] = frozenset()
    """Addresses that may be reached although they are not public, each with its port, or all its ports (None)."""
    hosts: dict[str, Address] = field(default_factory=dict)
    """Names that mean this address, whatever the DNS says."""
    intercept: Literal["needed", "always"] = "needed"
    ech: Literal["allow", "refuse"] = "allow"
    approval_s: float = defaults.APPROVAL_S
    approval_scope_s_max: float | None = None
    webhook: Webhook | None = None
    nameservers: tuple[tuple[str, int], ...] | None = None
    ca_file: Path | None = None
    """Roots that the interceptor trusts beside the system's."""
    limits: EgressLimits | None = None
    """What a request's limits may be at most; None, or where the file names none: what the API takes."""
    path: Path | None = None

    def excepts(self, address: Address, port: int) -> bool:
        """Whether the file names this exact address."""
        return (address, port) in self.addresses or (address, None) in self.addresses


def load(path: Path | None, *, presets: PresetsOf | None = None) -> Organisation:
    """Without a file, or if it is not there, the built-in default."""
    found = None if path is None else read_document(path)
    if found is None:
        return Organisation()
    text, table = found
    table.only(_KEYS)
    if table.number("version", VERSION, whole=True) != VERSION:
        raise table.bad("version", f"is not {VERSION}, the only one there is")
    approvals = table.table("approvals")
    approvals.only({"timeout_s", "scope_s_max", "webhook"})
    reading = _Rules(presets or Presets())
    return Organisation(
        digest="sha256:" + hashlib.sha256(text.encode()).hexdigest(),
        deny=reading.rules(table, "deny", Effect.DENY),
        allow=reading.rules(table, "allow", None),
        offer=reading.rules(table, "offer", None) if table.has("offer") else None,
        default=Effect(table.one_of("default", ("deny", "ask"))),
        addresses=frozenset(_address(table, "addresses", at, each) for at, each in table.texts("addresses")),
        hosts=_hosts(table.table("hosts")),
        intercept=table.one_of("intercept", ("needed", "always")),
        ech=table.one_of("ech", ("allow", "refuse")),
        approval_s=approvals.number("timeout_s", defaults.APPROVAL_S, above=0, most=APPROVAL_S_MAX),
        approval_scope_s_max=_scope(approvals),
        webhook=_webhook(approvals),
        nameservers=_nameservers(table),
        ca_file=table.file("ca_file"),
        limits=_limits(table),
        path=path,
    )


_KEYS: Final = {
    "version",
    "default",
    "deny",
    "allow",
    "offer",
    "addresses",
    "hosts",
    "intercept",
    "ech",
    "approvals",
    "nameservers",
    "ca_file",
    "limits",
}


class _Rules:
    """The rules of one tier, each with its line as its source."""

    def __init__(self, presets: PresetsOf) -> None:
        self._presets = presets

    def rules(self, table: Table, tier: str, effect: Effect | None) -> tuple[Rule, ...]:
        found: list[Rule] = []
        for number, entry in enumerate(table.entries(tier)):
            source = f"{table.path.name}:{entry.line}"
            asked = self._asked(table, tier, entry.line, entry.plain())
            try:
                found += rules_of_one(
                    asked, rule_id=f"{tier}[{number}]", presets=self._presets, source=source, effect=effect
                )
            except ClocheError as refused:
                if refused.code != "policy_invalid":
                    raise
                raise table.wrong(entry.line, refused.message) from None
            if effect is None and any(rule.effect is Effect.DENY for rule in found):
                raise table.wrong(entry.line, "what is denied stands below `deny`")
        return tuple(found)

    def _asked(self, table: Table, tier: str, line: int, value: object) -> Asked:
        if isinstance(value, str):
            return value
        if not isinstance(value, dict):
            raise table.wrong(line, f"a rule of `{tier}` is a text or a mapping")
        try:
            return EgressRule.model_validate(value)
        except ValidationError as wrong:
            first = wrong.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise table.wrong(line, f"{shown(where)}: {first['msg']}") from None


def _address(table: Table, key: str, line: int, text: str) -> tuple[Address, int | None]:
    """`ADDRESS` or `ADDRESS:PORT`; version 6 with a port in brackets."""
    try:
        alone = text.count(":") > 1 and not text.startswith("[")
        with_port = not alone and ":" in text and not text.endswith("]")
        host, port = host_and_port(text) if with_port else (text, None)
        address = normal_host(host)[1]
    except BadName as bad:
        raise table.wrong(line, f"`{key}`: {shown(text)}: {bad}") from None
    if address is None:
        raise table.wrong(line, f"`{key}`: {shown(text)} is not an address: an exception is for one address, by number")
    return address, port


def _hosts(table: Table) -> dict[str, Address]:
    found = {}
    for key in table.names():
        line = table.line(key)
        try:
            name, address = normal_host(key)
        except BadName as bad:
            raise table.wrong(line, f"{shown(key)}: {bad}") from None
        if address is not None:
            raise table.wrong(line, f"{shown(key)} is an address; give a name")
        found[name], port = _address(table, "hosts", line, table.text(key))
        if port is not None:
            raise table.wrong(line, "`hosts` takes addresses without a port")
    return found


def _scope(approvals: Table) -> float | None:
    if not approvals.has("scope_s_max"):
        return None
    return approvals.number("scope_s_max", 0, above=0, most=defaults.APPROVAL_SCOPE_S_MAX)


def _webhook(approvals: Table) -> Webhook | None:
    if not approvals.has("webhook"):
        return None
    table = approvals.table("webhook")
    table.only({"url", "key_file"})
    url, key_file = table.text("url"), table.file("key_file")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise table.bad("url", "is not https://HOST[:PORT]/PATH, or http:// of the same form")
    if key_file is None:
        raise table.bad("key_file", "is missing: questions are signed")
    return Webhook(url, key_file)


def _nameservers(table: Table) -> tuple[tuple[str, int], ...] | None:
    if not table.has("nameservers"):
        return None
    found = [_address(table, "nameservers", line, text) for line, text in table.texts("nameservers")]
    if not found:
        raise table.bad("nameservers", "is empty: leave it out for the system's")
    return tuple((str(address), port or DNS_PORT) for address, port in found)


def _limits(table: Table) -> EgressLimits | None:
    if not table.has("limits"):
        return None
    limits = table.table("limits")
    named = {key: limits.number(key, 0) for key in limits.names()}
    values = {"connections": defaults.EGRESS_CONNECTIONS_MAX, "attempts_per_s": ATTEMPTS_PER_S_MAX} | named
    try:
        return EgressLimits.model_validate(values)
    except ValidationError as wrong:
        key = str(wrong.errors()[0]["loc"][0])
        raise limits.wrong(limits.line(key), f"`{shown(key)}`: {wrong.errors()[0]['msg']}") from None
