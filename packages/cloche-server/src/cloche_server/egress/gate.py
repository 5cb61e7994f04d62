"""One sandbox's only way out. It knows who asks because it knows whose channel it is.

The guest opens streams; each becomes a conversation, which makes attempts; an attempt goes through all steps; what they allow
becomes a connection. Everything that is open hangs on this object, so that `close` leaves nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from cloche.wire.egress import EgressLimits, EgressRecord
from cloche.wire.errors import ClocheError
from cloche_server.channel import JsonObject, Stream
from cloche_server.egress import refusals, steps
from cloche_server.egress.attempt import Attempt, Refused
from cloche_server.egress.connection import Connection
from cloche_server.egress.conversations import CONVERSATIONS, resolve
from cloche_server.egress.conversations.talk import Conversation
from cloche_server.egress.environment import SLOTS_MAX
from cloche_server.egress.guest_end import GuestEnd, GuestGone
from cloche_server.egress.intercepted import Intercepted
from cloche_server.egress.limits import Limits
from cloche_server.egress.often import Often
from cloche_server.egress.records import Records
from cloche_server.egress.services import Placeholders, Services, Who
from cloche_server.egress.settling import Settling
from cloche_server.egress.text import escaped
from cloche_server.logs import Log
from cloche_server.policy.decide import Policy
from cloche_server.policy.model import Carries

WAITING_MAX: Final = 64
"""Conversations beyond those that the limit of connections lets have one."""
SWEEP_S: Final = 15.0
WAIT_S_MAX: Final = 5.0
ATTEMPT_S_MAX: Final = 60.0
"""Besides the time that a person has to answer."""

_log = Log()


class Gate:
    """Made for each sandbox, at boot and at adoption, also when no rule allows anything."""

    def __init__(
        self,
        who: Who,
        policy: Policy,
        limits: EgressLimits,
        records: Records,
        services: Services,
        *,
        command_of: Callable[[int], str | None] = lambda slot: None,
        command_line_of: Callable[[str], str | None] = lambda command: None,
        placeholders: Callable[[], Placeholders | None] = lambda: None,
    ) -> None:
        self.who = who
        self.policy = policy
        self.records = records
        self.services = services
        self.command_of = command_of
        self.command_line_of = command_line_of
        self.placeholders = placeholders
        self._loop = asyncio.get_running_loop()
        used = records.bytes_moved() if limits.bytes_total is not None else 0  # by an earlier daemon's gate
        self.limits = Limits(limits, self._loop.time(), bytes_used=used)
        self.connections: set[Connection] = set()
        self.settling = Settling()
        self.names_refused: dict[tuple[str, str | None], float] = {}
        """By name and command: until when a refusal is not recorded again."""
        self._talks: dict[GuestEnd, asyncio.Task[None]] = {}
        self._count = records.seq
        self._closed = False
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._too_fast = Often(lambda count: self._record_often("rate_limited", "attempts came too fast", count))
        self._too_many = Often(lambda count: self._record_often("too_many_connections", "too many were open", count))

    # --- the guest opens ----------------------------------------------------------------------------

    def guest_open(self, stream: Stream, op: str, fields: JsonObject) -> None:
        """`GuestOpen` of the channel. Every field is the guest's: checked here, used only as a question."""
        if self._closed:
            stream.refuse()
        elif op == "resolve":
            resolve.answer(self, stream, fields)
        elif (make := CONVERSATIONS.get(op)) is None or (conversation := make(fields)) is None:
            stream.refuse()
        elif len(self._talks) >= self.limits.connections_max + WAITING_MAX:
            self._too_many.happened()
            stream.refuse("too_many_connections")
        else:
            guest = GuestEnd(stream, self._guest_over)
            stream.accept(guest)
            self.go_on(guest, conversation)

    def go_on(self, guest: GuestEnd, conversation: Conversation) -> None:
        """A task for this guest's connection; it is cancelled when the connection ends first."""
        if not guest.is_over:
            self._talks[guest] = self.services.spawn(self._talk(guest, conversation), f"egress {self.who.sandbox}")

    def command_in(self, slot: int) -> str | None:
        """Whose slot it is, as far as that can be known: several commands can share one."""
        return self.command_of(slot) if 0 <= slot <= SLOTS_MAX else None

    async def _talk(self, guest: GuestEnd, conversation: Conversation) -> None:
        try:
            await conversation(self, guest)
        except (GuestGone, TimeoutError):
            guest.reset("timed_out")
        except Exception as bad:  # a defect, met by hostile bytes: this connection pays, nothing else
            _log.error("a conversation failed", sandbox=self.who.sandbox, exc_info=bad)
            guest.reset("internal")
        except asyncio.CancelledError:
            guest.reset("closed")
            if self._closed or guest.is_over:
                return  # we cancelled it ourselves: the guest is gone, or the gate closes
            raise

    def _guest_over(self, guest: GuestEnd) -> None:
        task = self._talks.pop(guest, None)
        if task is not None and not task.done() and task is not asyncio.current_task(self._loop):
            task.cancel()

    # --- attempts -----------------------------------------------------------------------------------

    async def attempt(
        self, host: str, port: int, *, slot: int = 0, methods: Sequence[str] = (), path: str | None = None
    ) -> Attempt:
        """All steps. The answer has a connected socket, which the caller takes over. Raises Refused, recorded."""
        self._count += 1
        attempt = Attempt(self, host, port, self._count, self.command_in(slot), methods, path)
        attempt.started = self._loop.time()
        try:
            self.take_attempt()
            async with asyncio.timeout(ATTEMPT_S_MAX + self.services.organisation().approval_s):
                await steps.run(attempt)
                if attempt.intercepted and attempt.decision is not None and attempt.decision.carries is not Carries.WEB:
                    await self.intercept(attempt, tls=attempt.decision.carries is Carries.TLS)
        except Refused as refused:
            self.refuse(attempt, refused)
            raise
        except TimeoutError:
            late = Refused("timed_out", "it took too long", attempt.rule)
            self.refuse(attempt, late)
            raise late from None
        except BaseException:
            attempt.drop_socket()
            self.release(attempt, "guest_gone")
            raise
        return attempt

    async def wait_attempt(self) -> None:
        """For a request in a connection that is there: a busy client is slowed down before it is refused."""
        until = self._loop.time() + WAIT_S_MAX
        while not self.limits.attempts.take(now := self._loop.time()):
            wait_s = self.limits.attempts.next_s()
            if now + wait_s > until:
                self.take_attempt()
            await asyncio.sleep(wait_s)

    def take_attempt(self) -> None:
        if not self.limits.attempts.take(self._loop.time()):
            self._too_fast.happened()
            raise Refused("rate_limited", f"this sandbox may make {self.limits.attempts.per_s:g} attempts a second")

    async def intercept(self, attempt: Attempt, *, tls: bool) -> None:
        """Open it through the interceptor: the attempt's socket is then the interceptor's, not the target's."""
        side = Intercepted(self, attempt)
        try:
            attempt.sock = await self.services.interception.open(
                side, self.who, attempt.at(), tls=tls, rule=attempt.rule
            )
        except ClocheError as bad:
            raise Refused(bad.code, f"{bad.message} {bad.fix}", attempt.rule) from bad
        attempt.sock.setblocking(False)
        self.settling.add(attempt.command, side)
        attempt.let_go = side.leave

    def refuse(self, attempt: Attempt, refused: Refused) -> None:
        """Write it down and let go of all that the attempt holds."""
        attempt.drop_socket()
        if not attempt.recorded or refused.code != "unreachable":
            self.record_denied(attempt, refused)
        self.release(attempt, refused.code)

    def release(self, attempt: Attempt, code: str, *, up: int = 0, down: int = 0, requests: int = 0) -> None:
        """An attempt is over: its slot is free, and a record says what it came to."""
        if attempt.slot_held:
            attempt.slot_held = False
            self.limits.give_connection()
        let_go, attempt.let_go = attempt.let_go, None
        if let_go is not None:
            let_go()
        if attempt.recorded:
            attempt.recorded = False
            text = f"{requests} requests" if requests else ""
            self.record(attempt, "closed", code, text, up=up, down=down)

    # --- records ------------------------------------------------------------------------------------

    def record_allowed(self, attempt: Attempt, text: str = "") -> None:
        """Before the effect: what cannot be written down does not happen."""
        assert attempt.decision is not None
        try:
            self.records.write(self._record_of(attempt, "allowed", "allowed", text or attempt.decision.text))
        except OSError as bad:
            _log.error("an egress record was not written", sandbox=self.who.sandbox, exc_info=bad)
            raise Refused("internal", "the node cannot write its records", attempt.rule) from bad

    def record_denied(self, attempt: Attempt, refused: Refused) -> None:
        if refused.code == "rate_limited":
            return  # told by `Often`
        text = refusals.for_person(refused, sandbox=self.who.sandbox, host=attempt.host, port=attempt.port)
        self.record(attempt, "denied", refused.code, text, rule=refused.rule)

    def alert(self, attempt: Attempt, kind: str, where: str, secret: str) -> None:
        self.record(attempt, "alert", kind, f"{secret}: in {where}")

    def record(
        self,
        attempt: Attempt,
        verdict: Literal["allowed", "denied", "closed", "alert"],
        code: str,
        text: str,
        *,
        rule: str | None = None,
        up: int | None = None,
        down: int | None = None,
    ) -> None:
        """After the effect, or without one: what cannot be written down is told to the log."""
        record = self._record_of(attempt, verdict, code, text, rule=rule, up=up, down=down)
        try:
            self.records.write(record)
        except OSError as bad:
            _log.error("an egress record was not written", sandbox=self.who.sandbox, code=code, exc_info=bad)

    def _record_of(
        self, attempt: Attempt, verdict: Literal["allowed", "denied", "closed", "alert"], code: str, text: str,
        *, rule: str | None = None, up: int | None = None, down: int | None = None,
    ) -> EgressRecord:  # fmt: skip
        address = attempt.address or (attempt.addresses[0] if attempt.addresses else None)
        return EgressRecord.model_construct(
            seq=0,
            at=0.0,
            sandbox="",
            command=attempt.command,
            verdict=verdict,
            code=code,
            rule=attempt.rule if rule is None else rule,
            policy=attempt.policy.digest,
            host=escaped(attempt.host, 253),
            port=attempt.port,
            address=None if address is None else str(address),
            method=None if attempt.method is None else escaped(attempt.method, 32),
            path=None if attempt.path is None else escaped(attempt.path.partition("?")[0], 1024),
            connection=attempt.connection,
            intercepted=attempt.intercepted,
            bytes_up=up,
            bytes_down=down,
            duration_s=round(self._loop.time() - attempt.started, 6) if verdict == "closed" else None,
            text=text,
        )

    def record_bad_request(self, slot: int, text: str, code: str = "bad_request") -> None:
        """Somebody spoke to the proxy in a way that names no target, or not safely."""
        try:
            self.take_attempt()
        except Refused:
            return
        self.record(Attempt(self, "", 0, 0, self.command_in(slot)), "denied", code, escaped(text))

    def _record_often(self, code: str, what: str, count: int) -> None:
        attempt = Attempt(self, "", 0, 0)
        self.record(attempt, "denied", code, what if count == 1 else f"{what}: {count} more in the last second")

    # --- changes and the end --------------------------------------------------------------------------

    def change(self, policy: Policy) -> None:
        """The policy is another one now: what it does not allow is cut, what waits for a person is void."""
        self.policy = policy
        self.names_refused.clear()
        self.services.approvals.void(self.who.sandbox, "the policy changed")
        for connection in tuple(self.connections):
            if not connection.still_allowed(policy):
                connection.relay.cut("policy_changed")

    def sweep_soon(self) -> None:
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweep_timer = None
        for connection in tuple(self.connections):
            connection.sweep()
        if self.connections:
            self.sweep_soon()

    async def close(self, reason: str) -> None:
        """Nothing is open, waiting or running when it returns. The records stay open: they are their maker's."""
        self._closed = True
        talks = dict(self._talks)
        for guest, task in talks.items():
            task.cancel()
            guest.reset(escaped(reason, 64))
        for connection in tuple(self.connections):
            connection.relay.cut("closed")
        if talks:
            await asyncio.wait(talks.values())
        for each in (self._too_fast, self._too_many):
            each.close()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None

    @property
    def open_count(self) -> dict[str, Any]:
        """For the node's figures and for tests."""
        return {"talks": len(self._talks), "connections": len(self.connections), "slots": self.limits.connections}
