"""What every engine can be asked: a closed set. One contract test suite runs against each of them.

The daemon holds an `Engine` per kind and an `Instance` per live sandbox. An engine that lacks a capability says so in
`capabilities()`; calling it then raises `Unsupported`. Nothing is emulated silently.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .spec import SandboxSpec


class EngineError(Exception):
    """Starting, adopting or asking an engine failed; `code` is from the public error table."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Unsupported(EngineError):
    """The engine said in `capabilities()` that it lacks this."""

    def __init__(self, what: str) -> None:
        super().__init__("unsupported", f"this engine cannot {what}")


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do."""

    isolation_class: str
    experimental: bool = False
    pause: bool = False
    checkpoint: bool = False
    export_upper: bool = False


@dataclass(frozen=True)
class IsolationReport:
    """What was achieved for one sandbox, read back and not assumed."""

    isolation_class: str
    engine: str
    version: str
    digest: str
    host_uid: int
    cgroup: str | None
    weaker: tuple[str, ...] = ()
    experimental: bool = False


@dataclass(frozen=True)
class ProcessEnd:
    """How the engine's process ended: from the cgroup's counter and the pidfd, never from a wait status alone."""

    oom_kills: int
    status: int | None
    """Raw wait status where somebody could reap it."""


@dataclass(frozen=True)
class InstanceStats:
    """What a sandbox uses, read from outside the guest."""

    cpu_s: float
    memory_bytes: int
    memory_peak_bytes: int
    extra: dict[str, Any] = field(default_factory=dict)


class Instance(Protocol):
    """One live sandbox, as its engine sees it."""

    @property
    def id(self) -> str: ...

    @property
    def channel(self) -> socket.socket:
        """The host's end of the guest channel. The keeper holds a second copy."""
        ...

    @property
    def pid(self) -> int: ...

    def isolation(self) -> IsolationReport: ...

    async def start(self) -> None:
        """Lets the guest run (it is booted stopped). Not for an adopted one."""
        ...

    async def seal(self) -> None:
        """After HELLO: ends every helper process that is not needed any more (gVisor's gofer)."""
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def export_upper(self, sink_fd: int, *, bytes_max: int) -> int:
        """Writes the writable layer as a tar to `sink_fd` (a pipe or a file) while the guest stands still; how many bytes.

        Not for a paused one: it runs afterwards, whatever happened. EngineError when the engine fails, does not end, or has
        more than `bytes_max` (`too_large`); OSError when the sink refuses. What was written until then is of no use.
        """
        ...

    def stats(self) -> InstanceStats: ...

    async def wait_dead(self) -> None:
        """Returns when the engine's process is dead. Cancellable, callable more than once."""
        ...

    async def kill(self) -> ProcessEnd:
        """Ends it and removes every process, cgroup, mount and file of it. Idempotent; returns when all is gone."""
        ...


class Engine(Protocol):
    """One kind of isolation."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def capabilities(self) -> Capabilities: ...

    async def boot(self, spec: SandboxSpec) -> Instance:
        """Everything up to a started-but-stopped guest. On any failure nothing is left behind."""
        ...

    async def adopt(self, spec: SandboxSpec) -> Instance | ProcessEnd:
        """A sandbox that an earlier daemon booted; when it is dead, how it died (what is left of it is removed)."""
        ...


Undo = Callable[[], Awaitable[None]]
