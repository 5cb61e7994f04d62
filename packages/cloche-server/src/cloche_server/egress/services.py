"""What a gate needs of the rest of the node, as protocols: this room imports none of those who fulfil them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Container, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from cloche_server.egress.own_addresses import OwnAddresses
from cloche_server.policy.model import Address, Decision, Target

if TYPE_CHECKING:
    from cloche_server.policy.document import Organisation


@dataclass(frozen=True, slots=True)
class Who:
    """Whose gate this is. It comes from the channel, never from what the guest says."""

    sandbox: str
    owner: str
    tenant: str
    lineage: str


class Resolver(Protocol):
    """Names to addresses, for all gates of a node."""

    async def addresses(self, name: str) -> tuple[Address, ...]:
        """Every address of the name, at most 16, in the order to try. Raises `Unresolved`."""


class Unresolved(Exception):
    """The name has no address, or nobody could be asked. The message is for a person."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a person is asked. Everything in it that a guest chose is escaped already."""

    sandbox: str
    owner: str
    tenant: str
    rule: str
    host: str
    port: int
    address: str
    method: str | None = None
    path: str | None = None
    command: str | None = None
    command_line: str | None = None


class Verdict(Protocol):
    """What came of a question."""

    @property
    def approved(self) -> bool: ...

    @property
    def by(self) -> str | None: ...

    @property
    def reason(self) -> str: ...


class Approver(Protocol):
    """Who asks a person and waits, bounded."""

    async def ask(self, question: Question, *, timeout_s: float) -> Verdict: ...

    def void(self, sandbox: str, why: str) -> None: ...


class Placeholders(Protocol):
    """What stands inside for the sandbox's secrets."""

    def found(self, text: bytes) -> str | None:
        """The name of the secret whose placeholder, in any form, is in the text."""


class InterceptedConnection(Protocol):
    """One connection as the interceptor's host side sees it: what the gate does for it."""

    async def dial(self) -> socket.socket: ...

    async def request(self, method: str, path: str) -> Decision: ...

    def alert(self, kind: str, where: str, secret: str) -> None: ...

    def denied(self, code: str, text: str, method: str | None, path: str | None) -> None: ...

    def closed(self) -> None: ...


class Interceptor(Protocol):
    """Opens one connection through the tenant's interceptor; the answer is the end that the client's bytes go into."""

    async def open(
        self, gate_side: InterceptedConnection, who: Who, target: Target, *, tls: bool, rule: str
    ) -> socket.socket: ...


class Spawn(Protocol):
    """Starts a task that is kept until it is done, and whose failure is told."""

    def __call__(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]: ...


@dataclass(slots=True)
class Services:
    """Made once per node."""

    organisation: Callable[[], Organisation]
    resolver: Resolver
    approvals: Approver
    interception: Interceptor
    spawn: Spawn
    clock: Callable[[], float] = field(default=time.time)
    own_addresses: Callable[[], Container[Address]] = field(default_factory=OwnAddresses)
    """Of the node: never reached, unless the organisation's file names them."""
