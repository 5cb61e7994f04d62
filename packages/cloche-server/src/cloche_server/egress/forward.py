"""Plain HTTP: every request's head is read and agrees with what was allowed; answers go back as they come.

One upstream connection at a time. A request for another target closes it and goes all steps anew. While a request is decided by
a task, what follows it waits here, within the stream's window. On the fast path, a request for the same target that no rule
needs to see, there is neither task nor record.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from cloche_server.egress import refusals
from cloche_server.egress.attempt import Attempt, Refused
from cloche_server.egress.connection import Connection
from cloche_server.egress.conversations.talk import HEAD_S
from cloche_server.egress.fields import BadRequest
from cloche_server.egress.guest_end import GuestEnd
from cloche_server.egress.heads import Body, Head, RequestReader
from cloche_server.egress.steps import allow, approve
from cloche_server.policy.model import Effect

if TYPE_CHECKING:
    from cloche_server.egress.gate import Gate
    from cloche_server.policy.decide import Policy

STATUS_BYTES: Final = 12
_SWITCHING: Final = re.compile(rb"HTTP/1\.1 101")


class Forward:
    """A `Flow`. In a tunnel the target is known; as a proxy, each request names its own."""

    def __init__(self, gate: Gate, guest: GuestEnd, *, slot: int = 0, reader: RequestReader | None = None) -> None:
        self._gate = gate
        self._guest = guest
        self._slot = slot
        self._reader = reader or RequestReader()
        self._connection: Connection | None = None
        self._policy: Policy | None = None
        self._tunnel: Attempt | None = None
        self._sees = False
        """Each request is decided on its own."""
        self._busy = self._opaque = self._in_body = self._eof = False
        self._kept = bytearray()
        self._out: list[bytes] = []
        self._status: bytearray | None = None
        """The first bytes of the answer to an upgrade."""
        self._head_timer: asyncio.TimerHandle | None = None

    # --- the beginning ----------------------------------------------------------------------------

    def begin_within(self, attempt: Attempt, early: bytes) -> None:
        """In a tunnel that is open already."""
        self._tunnel = attempt
        self._attach(attempt)
        self._guest.flow_to(self, early)

    async def begin_with(self, head: Head) -> None:
        """As a proxy, with the first request."""
        self._busy = True
        self._in_body = head.has_body
        await self._connect(head)
        if not self._guest.is_over:
            self._guest.flow_to(self)

    def _attach(self, attempt: Attempt) -> None:
        self._connection = Connection(self._gate, self._guest, attempt)
        self._policy = None
        self._connection.relay.start()

    # --- what the guest sends -----------------------------------------------------------------------

    def up(self, view: memoryview) -> None:
        if self._opaque:
            assert self._connection is not None
            self._connection.relay.up(view)
        elif self._busy:
            self._keep(view)
        else:
            self._reader.feed(bytes(view))
            self._read()

    def up_eof(self) -> None:
        self._eof = True
        if self._busy:
            return
        if self._connection is None:
            self._guest.end_ok()
        else:
            self._connection.relay.up_eof()

    def gone(self, reason: str) -> None:
        self._stop_timer()
        if self._connection is not None:
            self._connection.relay.gone(reason)

    def _keep(self, view: memoryview) -> None:
        self._kept += view
        self._guest.held = len(self._kept)

    def _read(self) -> None:
        try:
            while not self._busy and (event := self._reader.next_event()) is not None:
                if type(event) is Head:
                    self._in_body = event.has_body
                    self._take(event)
                elif type(event) is Body:
                    self._out.append(event.data)
                else:
                    self._in_body = False
            self._flush()
        except BadRequest as bad:
            self._refuse(Refused("bad_request", str(bad)), None)
        except Refused as refused:
            self._refuse(refused, None)
        self._watch_head()

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and self._connection is not None:
            self._connection.relay.up(out[0] if len(out) == 1 else b"".join(out))
        elif not self._guest.is_over and not self._busy:
            self._guest.taken(0)

    # --- one head -----------------------------------------------------------------------------------

    def _take(self, head: Head) -> None:
        if head.form == "connect":
            raise Refused("bad_request", "there is no CONNECT inside a connection")
        connection = self._connection
        target = None if connection is None else connection.attempt.at()
        same = target is not None and target.host == head.host and target.port == head.port
        if self._tunnel is not None and not same:
            raise Refused("host_mismatch", f"this connection is for {self._tunnel.host} only")
        if self._tunnel is None and head.form != "absolute":
            raise Refused("bad_request", "a request to a proxy names the whole URL")
        if not same or connection is None or connection.relay.is_over:
            self._go_on(self._connect, head)
            return
        if self._gate.policy is not self._policy:
            self._look_again(connection.attempt)
        if self._sees:
            self._decide(connection.attempt, head)
        else:
            self._send(head)

    def _send(self, head: Head) -> None:
        connection = self._connection
        assert connection is not None
        connection.requests += 1
        self._out.append(head.for_upstream())
        if head.upgrade:
            self._busy = True
            self._status = bytearray()
            connection.relay.peek = self._answered
            self._flush()

    def _look_again(self, attempt: Attempt) -> None:
        """The policy is new to us: must it see each request?"""
        self._policy = self._gate.policy
        decision = self._policy.connect(attempt.at())
        asks = decision.effect is Effect.ASK and self._tunnel is None
        self._sees = not attempt.intercepted and (asks or decision.intercept)

    def _decide(self, of: Attempt, head: Head) -> None:
        attempt = self._one_request(of, head)
        try:
            self._gate.take_attempt()
            decision = attempt.decision
            assert decision is not None
            if decision.effect is Effect.DENY:
                raise Refused(decision.code, decision.text, decision.rule)
            if decision.effect is Effect.ALLOW:
                self._gate.record_allowed(attempt)
        except Refused as refused:
            self._gate.record_denied(attempt, refused)
            self._refuse(refused, head)
            return
        if decision.effect is Effect.ASK:  # the answer can take longer than a server keeps a connection: dial after it
            self._go_on(self._connect if self._tunnel is None else self._ask, head)
        else:
            self._send(head)

    def _one_request(self, of: Attempt, head: Head) -> Attempt:
        attempt = Attempt(self._gate, of.host, of.port, of.connection, of.command, head.methods, head.path)
        attempt.target, attempt.address, attempt.fixed = of.target, of.address, of.address
        attempt.approved = None if self._tunnel is None else self._tunnel.approved
        attempt.decision = allow.decided(attempt)
        return attempt

    # --- what a task does -----------------------------------------------------------------------------

    def _go_on(self, work: Callable[[Head], Awaitable[None]], head: Head) -> None:
        self._flush()
        self._busy = True
        self._gate.go_on(self._guest, lambda gate, guest: work(head))

    async def _connect(self, head: Head) -> None:
        """All steps for the target that the head names; then what waited goes on."""
        old, self._connection = self._connection, None
        if old is not None:
            old.relay.leave()
        try:
            attempt = await self._gate.attempt(
                head.host, head.port, slot=self._slot, methods=head.methods, path=head.path
            )
        except Refused as refused:
            self._refuse(refused, head)
            return
        self._attach(attempt)
        self._resume(head)

    async def _ask(self, head: Head) -> None:
        """A person is asked about this one request."""
        assert self._connection is not None
        attempt = self._one_request(self._connection.attempt, head)
        try:
            await approve.step(attempt)
            self._gate.record_allowed(attempt, "A person approved it.")
        except Refused as refused:
            self._gate.record_denied(attempt, refused)
            self._refuse(refused, head)
            return
        self._resume(head)

    def _resume(self, head: Head | None) -> None:
        self._busy = False
        if head is not None:
            self._send(head)
        kept, self._kept = bytes(self._kept), bytearray()
        self._guest.held = 0
        self._read()
        if kept:
            self.up(memoryview(kept))
        if self._eof and not self._busy and not self._guest.is_over:
            self.up_eof()

    # --- WebSocket -------------------------------------------------------------------------------------

    def _answered(self, view: memoryview) -> None:
        """The server's answer to an upgrade. Only if it agreed is what follows no HTTP."""
        status, connection = self._status, self._connection
        assert status is not None
        assert connection is not None
        status += view[: STATUS_BYTES - len(status)]
        if len(status) < STATUS_BYTES:
            return
        connection.relay.peek = None
        self._status = None
        rest = self._reader.rest
        self._reader = RequestReader()
        self._opaque = _SWITCHING.match(status) is not None
        self._kept[:0] = rest
        self._resume(None)

    # --- the end ----------------------------------------------------------------------------------------

    def _refuse(self, refused: Refused, head: Head | None) -> None:
        """Say it after the answers that went before, then close."""
        self._stop_timer()
        self._busy = True
        connection, self._connection = self._connection, None
        host, port = ("", 0) if head is None else (head.host, head.port)
        if head is None:
            self._gate.record_bad_request(self._slot, refused.text, refused.code)
        if connection is not None:
            connection.relay.leave()
        self._guest.held = 0
        self._guest.finish(refusals.http(refused, sandbox=self._gate.who.sandbox, host=host, port=port))

    def _watch_head(self) -> None:
        """A head that has begun must end in time."""
        waiting = not self._busy and not self._in_body and not self._opaque and not self._reader.is_between_requests
        if waiting and self._head_timer is None and not self._guest.is_over:
            self._head_timer = asyncio.get_running_loop().call_later(HEAD_S, self._too_slow)
        elif not waiting:
            self._stop_timer()

    def _too_slow(self) -> None:
        self._head_timer = None
        self._refuse(Refused("timed_out", "the head of a request took too long"), None)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
