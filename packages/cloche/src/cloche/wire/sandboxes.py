"""Sandboxes as the API shows them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from . import defaults
from .commands import ARGUMENTS_MAX, Argument, FirstCommand
from .egress import Asked, EgressLimits, EgressView
from .ends import End

NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
EnvValue = Annotated[str, Field(max_length=128 * 1024)]
Privileges = Literal["none", "package-install"]
PullPolicy = Literal["missing", "always", "never"]


class Limits(BaseModel):
    """Hard limits, enforced outside the guest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpus: float = Field(default=defaults.CPUS, gt=0.01, le=defaults.CPUS_MAX)
    memory_bytes: int = Field(default=defaults.MEMORY_BYTES, ge=defaults.MEMORY_BYTES_MIN, le=defaults.MEMORY_BYTES_MAX)
    processes: int = Field(default=defaults.PROCESSES, ge=4, le=defaults.PROCESSES_MAX)
    disk_bytes: int = Field(default=defaults.DISK_BYTES, ge=defaults.DISK_BYTES_MIN, le=defaults.DISK_BYTES_MAX)
    open_files: int = Field(default=defaults.OPEN_FILES, ge=64, le=1_048_576)


class CreateSandbox(BaseModel):
    """`POST /v1/sandboxes`. The header `Idempotency-Key` makes a repeat answer with the first one's sandbox."""

    model_config = ConfigDict(extra="forbid")

    image: str | None = Field(default=None, min_length=1, max_length=512)
    """A name as everywhere else: `python:3.12-slim`, `registry.example/team/app@sha256:…`. None: the node's default."""
    pull: PullPolicy = "missing"
    """Whether a registry is asked when the image is not here: `missing`, `always` (is there a newer one?) or `never`."""
    entrypoint: Annotated[list[Argument], Field(max_length=ARGUMENTS_MAX)] | None = None
    """Instead of the image's, before `command`; the image's `cmd` is then left out. Empty: none."""
    isolation: Literal["gvisor", "microvm", "any"] = "any"
    """The floor. What was achieved is in the view; if the floor can't be met, create fails by name."""
    name: str | None = Field(default=None, pattern=NAME_PATTERN)
    labels: dict[str, str] = Field(default_factory=dict, max_length=64)
    env: dict[EnvName, EnvValue] = Field(default_factory=dict, max_length=1024)
    limits: Limits = Limits()
    ttl_s: float = Field(default=defaults.TTL_S, gt=0, le=defaults.TTL_S_MAX)
    idle_timeout_s: float | None = Field(default=defaults.IDLE_TIMEOUT_S, gt=0)
    retain_s: float = Field(default=defaults.RETAIN_S, ge=0, le=30 * 24 * 3600)
    user: str | None = Field(default=None, max_length=128)
    workdir: str | None = Field(default=None, max_length=4096)
    privileges: Privileges = "none"
    noexec_tmp: bool = False
    egress: Annotated[list[Asked], Field(max_length=256)] = []
    """What it may reach. Empty: nothing but what the organisation's file allows to all."""
    secrets: Annotated[list[EnvName], Field(max_length=64)] = []
    """Names of secrets that the operator has bound. Inside, a variable of that name holds a placeholder."""
    egress_limits: EgressLimits = EgressLimits()
    command: FirstCommand | None = None
    """A first command, started in the same step: saves one round trip. Without `argv` it is the image's own."""
    end_with_command: bool = False
    """With `command`: the sandbox ends when that command ends (what `cloche run` uses)."""


class SandboxState(StrEnum):
    """Where a sandbox is in its life."""

    CREATING = "creating"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


class Isolation(BaseModel):
    """What was achieved, not what was asked for."""

    model_config = ConfigDict(frozen=True)

    isolation_class: Literal["gvisor", "microvm"] = Field(serialization_alias="class", validation_alias="class")
    engine: str
    version: str
    digest: str
    """sha256 of the engine binary that runs it."""
    experimental: bool = False
    host_uid: int | None = None
    cgroup: str | None = None
    weaker: list[str] = []
    """What the operator accepted by name (`--accept`); empty in a normal node."""


class Usage(BaseModel):
    """What a sandbox uses now, read from its cgroup."""

    model_config = ConfigDict(frozen=True)

    cpu_s: float = 0.0
    cpu_percent: float | None = None
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    processes: int | None = None
    disk_bytes: int | None = None


class Sandbox(BaseModel):
    """The view of one sandbox."""

    id: str
    name: str | None = None
    tenant: str
    owner: str
    lineage: str
    image: str
    image_digest: str | None = None
    state: SandboxState
    isolation: Isolation | None = None
    limits: Limits
    labels: dict[str, str] = {}
    privileges: Privileges = "none"
    user: str | None = None
    workdir: str | None = None
    created_at: float
    age_s: float
    ends_in_s: float | None = None
    idle_timeout_s: float | None = None
    commands_running: int = 0
    usage: Usage | None = None
    ended: End | None = None
    first_command: str | None = None
    """The id of the command given at create, if any."""
    egress: EgressView = EgressView()


class SandboxList(BaseModel):
    """`GET /v1/sandboxes`."""

    sandboxes: list[Sandbox]


class Extend(BaseModel):
    """`POST …/extend`: the sandbox lives at least this long from now. Never shortens."""

    model_config = ConfigDict(extra="forbid")

    ttl_s: float = Field(gt=0, le=defaults.TTL_S_MAX)
