"""One try to get out: what is known of it so far, and the one way in which it can fail."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cloche_server.policy.model import Address, Decision, Target

if TYPE_CHECKING:
    from cloche_server.egress.gate import Gate
    from cloche_server.policy.decide import Policy


class Refused(Exception):
    """The gate says no. `text` is for a person, `code` for a program and the record."""

    def __init__(self, code: str, text: str, rule: str = "default") -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text
        self.rule = rule


@dataclass(slots=True, eq=False)
class Attempt:
    """The steps fill it in, from the top down. Who made it owns `sock` until something else takes it over."""

    gate: Gate
    host: str
    """As the guest wrote it, until `normalise` has passed."""
    port: int
    connection: int
    command: str | None = None
    methods: Sequence[str] = ()
    """Of a request: the one that it has, and any that a header makes of it."""
    path: str | None = None
    policy: Policy = field(init=False)
    target: Target | None = None
    decision: Decision | None = None
    shown: Address | None = None
    """What a person was shown when it was approved."""
    fixed: Address | None = None
    """It is connected there already: what a person is shown, whatever the name means now."""
    addresses: tuple[Address, ...] = ()
    address: Address | None = None
    """The one that was dialled."""
    intercepted: bool = False
    is_request: bool = False
    """One request in a connection that an interceptor sees into."""
    approved: str | None = None
    """The rule under which a person let the connection through."""
    slot_held: bool = False
    recorded: bool = False
    """An `allowed` record was written: a `closed` one must follow."""
    started: float = 0.0
    sock: socket.socket | None = None
    let_go: Callable[[], None] | None = None
    """Closes what was opened for it elsewhere; called once, at its end."""

    def __post_init__(self) -> None:
        self.policy = self.gate.policy

    @property
    def rule(self) -> str:
        return "default" if self.decision is None else self.decision.rule

    @property
    def method(self) -> str | None:
        """For a person: `POST`, or `POST as DELETE`."""
        return " as ".join(self.methods) or None

    def at(self) -> Target:
        assert self.target is not None, "the first step makes the target"
        return self.target

    def take_socket(self) -> socket.socket:
        """Hand the upstream socket over to whoever closes it from now on."""
        sock, self.sock = self.sock, None
        assert sock is not None, "the last step dialled"
        return sock

    def drop_socket(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None
