"""The way out, as the API shows it: rules that are asked for, limits, and a record of every attempt."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from . import defaults

HostPattern = Annotated[str, Field(min_length=1, max_length=261)]
"""`api.example.com`, `*.example.com`, an address, each with `:port` behind it when the rule is for that port alone."""
Method = Annotated[str, Field(pattern=r"^[A-Z]{1,32}$")]
PathPattern = Annotated[str, Field(pattern=r"^/", max_length=1024)]
Port = Annotated[int, Field(ge=1, le=65535)]
Protocol = Literal["web", "tcp"]
"""`web`: TLS whose name agrees, or HTTP whose Host agrees. `tcp`: any bytes; only for a host and port that are named."""


class EgressRule(BaseModel):
    """One rule: exactly one of `host` and `preset`. Methods and paths can be seen only by interception."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    effect: Literal["allow", "ask", "deny"] = "allow"
    host: HostPattern | None = None
    preset: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,62}$")] | None = None
    ports: Annotated[list[Port], Field(max_length=64)] | None = None
    """None: 443 (TLS) and 80 (HTTP)."""
    protocol: Protocol | None = None
    """None: `web` on 80 and 443, `tcp` on any other port that the rule names."""
    methods: Annotated[list[Method], Field(max_length=32)] | None = None
    paths: Annotated[list[PathPattern], Field(max_length=256)] | None = None
    """`*` stands for anything within one segment, `**` for anything."""
    intercept: bool = False


Asked = EgressRule | Annotated[str, Field(min_length=1, max_length=300)]
"""A rule, or its short form: `api.example.com`, `*.example.com:8443`, `preset:python-packages`, `ask:hooks.example.com`."""


class EgressLimits(BaseModel):
    """What one sandbox may use of the way out, enforced by the node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    connections: int = Field(default=defaults.EGRESS_CONNECTIONS, ge=1, le=defaults.EGRESS_CONNECTIONS_MAX)
    """At one time."""
    attempts_per_s: float = Field(default=defaults.EGRESS_ATTEMPTS_PER_S, gt=0, le=10_000)
    """New connections, and requests that are seen one by one, refused ones too."""
    bytes_per_s: int | None = Field(default=None, ge=1024)
    """Both directions together."""
    bytes_total: int | None = Field(default=None, ge=1)


class EgressRecord(BaseModel):
    """One attempt to get out: what was decided, why, and what came of it."""

    seq: int
    at: float
    sandbox: str
    command: str | None = None
    """Which command asked, as the guest tells; None when it cannot be known."""
    verdict: Literal["allowed", "denied", "closed", "alert"]
    """`closed` ends an `allowed` one and has its bytes and time."""
    code: str
    """`allowed`, or why not: `no_rule`, `denied_by_rule`, `address_refused`, `sni_mismatch`, `not_approved`, …"""
    rule: str
    """The id of the rule that decided; `default` when none did."""
    policy: str = ""
    host: str
    port: int
    address: str | None = None
    method: str | None = None
    path: str | None = None
    connection: int
    """Joins the records of one connection."""
    intercepted: bool = False
    bytes_up: int | None = None
    bytes_down: int | None = None
    duration_s: float | None = None
    text: str = ""
    """For a person: what happened and how it can be allowed."""


class EgressRecords(BaseModel):
    """`GET …/egress`."""

    records: list[EgressRecord]


class Grant(BaseModel):
    """`POST …/egress/grants`: lets a running sandbox reach one more host, for a while. Only its owner can, from outside."""

    model_config = ConfigDict(extra="forbid")

    rule: Asked
    for_s: float = Field(default=600, gt=0, le=24 * 3600)


class GrantView(BaseModel):
    """A grant that holds."""

    id: str
    rule: EgressRule
    ends_in_s: float


class GrantList(BaseModel):
    """`GET …/egress/grants`."""

    grants: list[GrantView]


class Explanation(BaseModel):
    """`GET …/egress/explain`: what the policy says of one target, and why. Nothing is resolved or dialled."""

    effect: Literal["allow", "ask", "deny"]
    rule: str
    code: str
    text: str
    policy: str


class EgressView(BaseModel):
    """What a sandbox may reach, in its view."""

    model_config = ConfigDict(frozen=True)

    rules: list[str] = []
    """Each as `id: effect host ports`, in the order in which they are asked."""
    policy: str = ""
    """Digest of the effective policy."""
    fronting: Literal["possible", "closed"] = "closed"
    """`possible`: some host is reached by tunnels whose content the gate does not see."""
    limits: EgressLimits = EgressLimits()
    secrets: list[str] = []
