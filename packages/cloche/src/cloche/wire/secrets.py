"""Secrets as the API shows them: what is bound to what. A value goes in and never comes out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from .egress import HostPattern, Method, PathPattern
from .sandboxes import EnvName

SecretName = EnvName
"""Inside, an environment variable of this name holds the placeholder."""


class Place(BaseModel):
    """Where in a request the value may stand. `{}` in `format` is the value: `Bearer {}`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["header", "basic", "query", "body"]
    name: str | None = Field(default=None, max_length=128)
    """The header's or the query parameter's; for `basic` the user that it is the password of (None: any)."""
    format: str = Field(default="{}", max_length=512)


class Source(BaseModel):
    """Where the value comes from. `value` was given once; the others are asked at each lease (`ttl_s`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["value", "file", "command", "http"]
    value: SecretStr | None = None
    path: str | None = Field(default=None, max_length=4096)
    argv: Annotated[list[str], Field(max_length=256)] | None = None
    url: str | None = Field(default=None, max_length=2048)
    method: Literal["GET", "POST"] = "GET"
    body: Annotated[str, Field(max_length=65_536)] | None = None
    field: str | None = Field(default=None, max_length=256)
    """With `http`: the JSON field (dots go deeper) that holds it."""
    headers_from: dict[str, str] = Field(default_factory=dict)
    """With `http`: request headers; a value `$NAME` is taken from the node's environment."""
    ttl_s: float | None = Field(default=None, gt=0, le=24 * 3600)
    """How long a minted value is used; None: as long as the sandbox lives."""


class SetSecret(BaseModel):
    """`PUT /v1/secrets/{name}`."""

    model_config = ConfigDict(extra="forbid")

    source: Source
    hosts: Annotated[list[HostPattern], Field(min_length=1, max_length=64)]
    methods: list[Method] | None = None
    paths: list[PathPattern] | None = None
    places: Annotated[list[Place], Field(min_length=1, max_length=16)]
    require: bool = False
    """A request to a bound host with another credential in that place is refused."""


class SecretView(BaseModel):
    """What is told of a secret."""

    name: SecretName
    owner: str
    source: Literal["value", "file", "command", "http"]
    hosts: list[str]
    methods: list[str] | None = None
    paths: list[str] | None = None
    places: list[Place]
    require: bool = False
    set_at: float
    leases: int = 0
    """Sandboxes that hold it now."""


class SecretList(BaseModel):
    """`GET /v1/secrets`."""

    secrets: list[SecretView]
