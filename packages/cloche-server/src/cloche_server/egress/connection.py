"""One connection that was allowed: joins its attempt, its relay and its last record."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cloche_server.egress.attempt import Attempt
from cloche_server.egress.guest_end import GuestEnd
from cloche_server.egress.relay import Relay
from cloche_server.policy.model import Carries, Effect

if TYPE_CHECKING:
    from cloche_server.egress.gate import Gate
    from cloche_server.policy.decide import Policy


class Connection:
    """Takes the attempt's socket over. From now on whatever happens ends in `_over`, once."""

    __slots__ = ("attempt", "gate", "relay", "requests")

    def __init__(self, gate: Gate, guest: GuestEnd, attempt: Attempt) -> None:
        self.gate = gate
        self.attempt = attempt
        self.requests = 0
        """Of plain HTTP: how many heads went up."""
        self.relay = Relay(guest, attempt.take_socket(), gate.limits.bytes, self._over)
        gate.connections.add(self)
        gate.sweep_soon()
        if guest.is_over:
            self.relay.gone("over")

    def _over(self, relay: Relay, code: str) -> None:
        self.gate.connections.discard(self)
        self.gate.release(self.attempt, code, up=relay.bytes_up, down=relay.bytes_down, requests=self.requests)

    def still_allowed(self, policy: Policy) -> bool:
        attempt, before = self.attempt, self.attempt.decision
        assert before is not None
        now = policy.connect(attempt.at())
        return (
            now.effect is not Effect.DENY
            and now.carries is before.carries
            and (not now.intercept or attempt.intercepted or now.carries is Carries.HTTP)
        )

    def sweep(self) -> None:
        self.relay.sweep(asyncio.get_running_loop().time())
