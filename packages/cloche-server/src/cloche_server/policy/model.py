"""The nouns of a decision: a target, a rule, a decision. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv6Address
from typing import Final

Address = IPv4Address | IPv6Address
HTTP_PORT: Final = 80
TLS_PORT: Final = 443
WEB_PORTS: Final = frozenset({HTTP_PORT, TLS_PORT})


class Effect(StrEnum):
    """What a rule says."""

    ALLOW = "allow"
    ASK = "ask"
    DENY = "deny"


class Carries(StrEnum):
    """What the bytes of an allowed connection must be."""

    TLS = "tls"
    HTTP = "http"
    WEB = "web"
    """TLS or HTTP, as the first byte says."""
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Target:
    """Where somebody wants to go. `host` is normal (`policy.names`); `address` is set when the host is an address."""

    host: str
    port: int
    address: Address | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """`host` is a name, `*.suffix`, or an address in its one normal form; `methods` and `paths` None: all."""

    id: str
    effect: Effect
    host: str
    ports: frozenset[int]
    tcp: bool = False
    """Any bytes may flow; else TLS or HTTP, by the port."""
    methods: frozenset[str] | None = None
    paths: tuple[str, ...] | None = None
    intercept: bool = False
    source: str = ""
    """For a person: `policy.yaml:12`, `the request`, `preset python-packages`."""

    @property
    def needs_plaintext(self) -> bool:
        return self.intercept or self.methods is not None or self.paths is not None


@dataclass(frozen=True, slots=True)
class Decision:
    """Of one connection or one request. `code` is what a record says, `text` what a person reads."""

    effect: Effect
    rule: str
    code: str
    text: str
    carries: Carries = Carries.TLS
    intercept: bool = False
    """The connection may go on only if each request in it is seen and decided."""
    exact: bool = True
    """False: the name was chosen by the guest below a pattern. With ASK, it must not be looked up before a person said
    yes: the question to the name server would carry it out."""
