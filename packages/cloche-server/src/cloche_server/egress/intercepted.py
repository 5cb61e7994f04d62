"""The gate's side of a connection whose bytes go through the interceptor: it decides, asks, dials and records for it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from cloche_server.egress import steps
from cloche_server.egress.attempt import Attempt, Refused
from cloche_server.egress.splice import Splice
from cloche_server.egress.steps import approve
from cloche_server.egress.text import escaped
from cloche_server.policy.model import Address, Decision, Effect

if TYPE_CHECKING:
    from cloche_server.egress.gate import Gate

SPLICES_MAX = 8


class Intercepted:
    """`InterceptedConnection` of the seams. The interceptor names the connection, never the target."""

    def __init__(self, gate: Gate, attempt: Attempt) -> None:
        self._gate = gate
        self._attempt = attempt
        self._splices: dict[Splice, Address] = {}
        self._shown: Address | None = None
        self._dialling = 0
        self._closed = False

    async def dial(self) -> socket.socket:
        """A connection to the target, checked now; the far end of the pair is the interceptor's. Raises Refused."""
        self._raise_if_closed()
        if len(self._splices) + self._dialling >= SPLICES_MAX:
            raise Refused("too_many_connections", "the interceptor has too many connections open for this one")
        attempt = self._child(None, None)
        attempt.shown, self._shown = self._shown, None
        self._dialling += 1
        try:
            await steps.run_later(attempt)
            self._raise_if_closed()
            ours, theirs = socket.socketpair()
        except BaseException:
            attempt.drop_socket()
            raise
        finally:
            self._dialling -= 1
        assert attempt.address is not None
        self._attempt.address = attempt.address
        splice = Splice(ours, attempt.take_socket(), self._splice_over)
        self._splices[splice] = attempt.address
        return theirs

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise Refused("closed", "the connection is closed")

    async def request(self, method: str, path: str) -> Decision:
        """Decide one request by today's policy; what must be asked is asked here. Recorded before it goes out."""
        gate, target = self._gate, self._attempt.at()
        try:
            await gate.wait_attempt()
        except Refused as refused:
            return Decision(Effect.DENY, refused.rule, refused.code, refused.text)
        attempt = self._child(method, path)
        attempt.decision = decision = gate.policy.request(target, method, path, approved=self._attempt.approved)
        try:
            if decision.effect is Effect.DENY:
                raise Refused(decision.code, decision.text, decision.rule)
            attempt.fixed = next(iter(self._splices.values()), None)
            await approve.step(attempt)
            self._shown = attempt.shown
            gate.record_allowed(attempt)
        except Refused as refused:
            gate.record_denied(attempt, refused)
            return Decision(Effect.DENY, refused.rule, refused.code, refused.text, decision.carries, decision.intercept)
        return Decision(Effect.ALLOW, decision.rule, decision.code, decision.text, decision.carries, decision.intercept)

    def alert(self, kind: str, where: str, secret: str) -> None:
        self._gate.alert(self._attempt, escaped(kind, 64), escaped(where, 200), escaped(secret, 128))

    def denied(self, code: str, text: str, method: str | None, path: str | None) -> None:
        self._gate.record_denied(
            self._child(method, path), Refused(escaped(code, 64), escaped(text), self._attempt.rule)
        )

    def closed(self) -> None:
        """The interceptor has said all that it will say of it."""
        self.leave()
        self._gate.settling.remove(self._attempt.command, self)

    def leave(self) -> None:
        """Nothing of it goes on; the interceptor may still report what it saw."""
        self._closed = True
        for splice in tuple(self._splices):
            splice.close()

    def _splice_over(self, splice: Splice) -> None:
        self._splices.pop(splice, None)

    def _child(self, method: str | None, path: str | None) -> Attempt:
        of = self._attempt
        child = Attempt(
            self._gate, of.host, of.port, of.connection, of.command, () if method is None else (method,), path
        )
        child.target, child.decision, child.address = of.target, of.decision, of.address
        child.intercepted = child.is_request = True
        return child
