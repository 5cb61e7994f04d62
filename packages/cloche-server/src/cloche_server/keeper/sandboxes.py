"""What the keeper knows of one sandbox, and what all sandboxes of a keeper share. No effects here but closing."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from cloche_server.engines.plan import Places, Plan
from cloche_server.engines.spec import SandboxSpec
from cloche_server.keeper.cgroups import Cgroup
from cloche_server.keeper.loop import Loop, Wait
from cloche_server.keeper.records import Record, Records
from cloche_server.keeper.verbs import Refusal
from cloche_server.keeper.view import View

FIRST_ID: Final = 1000
"""Inside ids below belong to the keeper itself."""

Steps = Generator[Wait, Any, None]


@dataclass(frozen=True)
class House:
    """What all sandboxes of this keeper share."""

    loop: Loop
    records: Records
    view: View
    work: str
    cgroups: Cgroup | None
    slots: int
    first_slot: int
    """Where looking for a free one begins: two nodes of one user have the same range of ids."""


class Sandbox:
    """One sandbox: its record, and the descriptors that only the keeper's process can hold."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.channel: socket.socket | None = None
        self.pidfd = -1
        self.helper_pidfd = -1
        self.command_pidfd = -1
        self.control: socket.socket | None = None
        """Connected while it was made (of a bare one: its log); given away with the first answer."""
        self.status: int | None = None
        self.oom_kills = 0
        self.undone = False
        """Nothing of it is left."""
        self.ending: list[Callable[[Refusal | None], None]] | None = None

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def host_id(self) -> int:
        """H, as the keeper's namespace counts; the engine's main process is H + 1."""
        return FIRST_ID + 2 * self.record.slot

    def close(self) -> None:
        for end in (self.channel, self.control):
            if end is not None:
                end.close()
        for fd in (self.pidfd, self.helper_pidfd, self.command_pidfd):
            if fd >= 0:
                os.close(fd)
        self.channel = self.control = None
        self.pidfd = self.helper_pidfd = self.command_pidfd = -1


class EngineCommand(Protocol):
    """The pure module of an engine (`engines.<name>.command`)."""

    STATE_BYTES_MAX: int

    def plan(self, spec: SandboxSpec, places: Places) -> Plan: ...

    def control_path(self, sandbox: str) -> str | None: ...

    def engine_pids(self, state: bytes) -> tuple[int, int]: ...


_COMMANDS: Final[dict[str, EngineCommand]] = {}


def command_of(engine: str) -> EngineCommand:
    """One of the closed list in `spec.ENGINES`; the module is loaded when first asked for."""
    if engine not in _COMMANDS:
        try:
            module: Any = importlib.import_module(f"cloche_server.engines.{engine}.command")
        except ImportError as error:
            raise Refusal("engine_missing", f"{engine}: {error}") from None
        _COMMANDS[engine] = module
    return _COMMANDS[engine]


@dataclass
class Making:
    """The state of one boot between its steps."""

    spec: SandboxSpec
    plan: Plan
    guest_end: socket.socket


def cgroup_of(house: House, sandbox: Sandbox) -> Cgroup | None:
    return None if house.cgroups is None else house.cgroups.child(sandbox.id)
