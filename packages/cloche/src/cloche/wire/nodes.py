"""The node itself, as the API shows it."""

from __future__ import annotations

from pydantic import BaseModel


class NodeView(BaseModel):
    """`GET /v1/node`."""

    version: str
    mode: str
    """`machine` (started by root for all users) or `user`."""
    pid: int
    keeper_pid: int | None = None
    engines: dict[str, str]
    accepted: list[str] = []
    cgroup: str | None = None
    state_dir: str
    default_image: str | None = None
    """What a sandbox runs whose caller names none."""
    interceptor: str = ""
    """`ready`, `not made` (at first need, which takes half a minute), or why this node can have none."""
    uptime_s: float
    sandboxes_running: int
    generation: int
    """How many daemons have served this state directory."""


class DiskUse(BaseModel):
    """`GET /v1/node/disk`."""

    images_bytes: int
    logs_bytes: int
    layers_bytes: int
    journal_bytes: int
    ended_sandboxes: int
    free_bytes: int


class Pruned(BaseModel):
    """`POST /v1/node/prune`."""

    sandboxes: int
    bytes: int


class Killed(BaseModel):
    """`DELETE /v1/sandboxes`."""

    sandboxes: int


class Event(BaseModel):
    """One line of the journal, as shown to its owner."""

    seq: int
    at: float
    kind: str
    sandbox: str | None = None
    command: str | None = None
    detail: dict[str, object] = {}


class EventList(BaseModel):
    """`GET /v1/events`."""

    events: list[Event]
