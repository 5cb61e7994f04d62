"""One interceptor process and what depends on it: its channel, its connections, its questions.

When the process dies, hangs or lies, everything of it ends at once: the channel, every connection, every question that waits. Its
ends of the socket pairs are closed by the kernel, so nothing that it held can go on.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from cloche.wire.errors import ClocheError
from cloche_server.egress.attempt import Refused
from cloche_server.egress.interception.control import Control
from cloche_server.egress.interception.messages import Alert, Closed, Denied, Dial, Message, Ready, Request, Response
from cloche_server.egress.limits import Attempts
from cloche_server.egress.services import InterceptedConnection
from cloche_server.egress.text import escaped
from cloche_server.logs import Log
from cloche_server.policy.model import Effect, Target

READY_S: Final = 20.0
HUNG_S: Final = 10.0
"""So long it may have something unread and say nothing."""
CONNECTIONS_MAX: Final = 2000
"""Of one process: it has two descriptors for each."""
DIALS_MAX: Final = 64
ASKS_MAX: Final = 512
"""Under way at a time, of one connection."""
MESSAGES_PER_S: Final = 10_000.0
"""Many times what it needs; one that says more would have the daemon's loop to itself."""
REPORTS_PER_S: Final = 200.0
"""Alerts and denials that are recorded, of one process; of more only the number."""
BUFFER_BYTES: Final = 256 * 1024
LAST_WORDS_MAX: Final = 1000
DENIED_STATUS: Final = 403

_log = Log()


class Started(Protocol):
    """A process behind its walls."""

    @property
    def channel(self) -> socket.socket: ...

    @property
    def pid(self) -> int: ...

    def last_words(self) -> str:
        """What it wrote to stderr: hostile text."""
        ...

    async def wait_dead(self) -> None: ...

    async def kill(self) -> int:
        """Everything of it is gone afterwards; how often the kernel killed in it for memory. Can be called again."""
        ...


@dataclass
class _Connection:
    """One connection that the process holds."""

    sandbox: str
    gate_side: InterceptedConnection
    dials: int = 0
    asks: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class Link:
    """`ended` is called once, when it is of no more use; `hide` takes what nobody may read out of its last words."""

    def __init__(
        self, started: Started, ended: Callable[[Link, asyncio.Task[None]], None], hide: Callable[[str], str] = str
    ) -> None:
        self._started = started
        self._hide = hide
        self._ended = ended
        self._connections: dict[int, _Connection] = {}
        self._last_conn = 0
        self._last_ask = 0
        self._last_dial = 0
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_over = False
        self._said = ""
        self._pace = Attempts(MESSAGES_PER_S, time.monotonic())
        self._reports = Attempts(REPORTS_PER_S, time.monotonic())
        self._unreported = 0
        self.why = ""
        """Why it is over."""
        self._control = Control(started.channel, self._hear, self._fail)
        self._watching = asyncio.create_task(self._watch(), name="interceptor watch")
        self._ending: asyncio.Task[None] | None = None
        self.begun_at = time.monotonic()
        self.used_at = self.begun_at
        self.lineages: set[str] = set()
        """Whose authority it was told."""
        self.sandboxes: set[str] = set()
        """Which it was told of."""

    @property
    def pid(self) -> int:
        return self._started.pid

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def connections(self) -> int:
        return len(self._connections)

    async def ready(self) -> None:
        """Raises ConnectionError when it ends before, TimeoutError when it takes too long (it is ended then)."""
        try:
            async with asyncio.timeout(READY_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            self._fail("it did not begin")
            raise

    def tell(self, message: dict[str, Any]) -> None:
        """ValueError when it is longer than the process takes."""
        self._control.send(message)

    def open(
        self, gate_side: InterceptedConnection, sandbox: str, lineage: str, target: Target, *, tls: bool, rule: str
    ) -> socket.socket:
        """The host's end of a new connection. Raises ConnectionError when there is no process any more."""
        if self._is_over:
            raise ConnectionError("the interceptor ended")
        self._last_conn += 1
        conn = self._last_conn
        ours, theirs = _pair()
        self._connections[conn] = _Connection(sandbox, gate_side)
        self.used_at = time.monotonic()
        self._control.send(
            {
                "t": "open",
                "conn": conn,
                "sandbox": sandbox,
                "lineage": lineage,
                "host": target.host,
                "port": target.port,
                "tls": tls,
                "rule": rule,
            },
            theirs.detach(),
        )
        if not self._control.is_open:  # it did not take even this
            ours.close()
            raise ConnectionError("the interceptor ended")
        return ours

    async def end(self, reason: str) -> None:
        """Nothing of the process is left afterwards."""
        self._fail(reason)
        if self._ending is not None:
            await asyncio.shield(self._ending)

    # ------------------------------------------------------------------------- its end

    async def _watch(self) -> None:
        """Its death by the kernel's word, and a hang: it has something unread and says nothing."""
        dead = asyncio.create_task(self._started.wait_dead(), name="interceptor death")
        unread, heard = 0, -1
        try:
            while True:
                done, _ = await asyncio.wait([dead], timeout=HUNG_S)
                if done:
                    self._fail("it died")
                    return
                self._listen()
                now = self._control.unread()
                if 0 < unread <= now and heard == self._control.heard:
                    self._fail("it hangs")
                    return
                unread, heard = now, self._control.heard
        finally:
            dead.cancel()

    def _listen(self) -> None:
        """The place for what it writes is small: only its last words are kept, and it must not wait for a reader."""
        self._said = (self._said + self._started.last_words())[-LAST_WORDS_MAX:]

    def _fail(self, reason: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        self.why = reason
        self._control.close()
        if not self._ready.done():
            self._ready.set_exception(ConnectionError(f"the interceptor: {reason}"))
            self._ready.exception()  # somebody may wait for it, or nobody
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            _let_go(connection)
        self._ending = asyncio.create_task(self._kill(reason, len(connections)), name="interceptor end")
        self._ended(self, self._ending)

    async def _kill(self, reason: str, connections: int) -> None:
        self._watching.cancel()
        self._listen()
        said = escaped(self._hide(self._said), LAST_WORDS_MAX)
        try:
            oom_kills = await self._started.kill()
        except ClocheError as bad:
            _log.error("the interceptor cannot be ended", reason=reason, code=bad.code, message=bad.message)
            return
        _log.info("the interceptor ended", reason=reason, connections=connections, oom_kills=oom_kills, said=said)

    # -------------------------------------------------------------------- what it says

    def _hear(self, message: Message) -> None:
        if not self._pace.take(time.monotonic()):
            self._fail("it lied: more messages than requests can need")
            return
        try:
            self._take(message)
        except Exception:  # a defect of ours: the process must not go on with what it did not get
            self._fail("the daemon failed at what it said")
            raise

    def _take(self, message: Message) -> None:
        if isinstance(message, Ready):
            if not self._ready.done():
                self._ready.set_result(None)
        elif isinstance(message, Dial):
            self._dial(message)
        elif isinstance(message, Request):
            self._request(message)
        elif isinstance(message, Response):
            if message.ask > self._last_ask:
                self._fail("it lied: a response to nothing")
        elif isinstance(message, Alert):
            if (found := self._of(message.conn)) is not None and self._is_reported(found):
                found.gate_side.alert(message.kind, escaped(message.where), escaped(message.secret))
        elif isinstance(message, Denied):
            self._denied(message)
        else:
            self._closed(message)

    def _of(self, conn: int) -> _Connection | None:
        """None for one that is over: its last words may still come. A number that was never given is a lie."""
        if conn > self._last_conn:
            self._fail(f"it lied: connection {conn} was never opened")
        return self._connections.get(conn)

    def _dial(self, message: Dial) -> None:
        if message.dial <= self._last_dial:
            self._fail("it lied: a dial that was asked before")
            return
        self._last_dial = message.dial
        found = self._of(message.conn)
        if self._is_over:
            return
        if found is None:
            self.tell({"t": "dialled", "dial": message.dial, "error": "the connection is over"})
            return
        found.dials += 1
        if found.dials > DIALS_MAX:
            self._fail("it lied: too many dials")
            return
        self._spawn(found, self._dialled(found, message.dial))

    async def _dialled(self, connection: _Connection, dial: int) -> None:
        failed: str | None = None
        try:
            end = await connection.gate_side.dial()
        except Refused as refused:
            failed = f"{refused.code}: {refused.text}"
        except ClocheError as bad:
            failed = f"{bad.code}: {bad.message}"
        except OSError as bad:
            failed = bad.strerror or "the connection failed"
        finally:
            connection.dials -= 1
        if failed is None:
            self._control.send({"t": "dialled", "dial": dial, "error": None}, end.detach())
        else:
            self.tell({"t": "dialled", "dial": dial, "error": failed[:500]})

    def _request(self, message: Request) -> None:
        if message.ask <= self._last_ask:
            self._fail("it lied: an ask that was asked before")
            return
        self._last_ask = message.ask
        found = self._of(message.conn)
        if self._is_over:
            return
        if found is None:
            self._refuse(message.ask, "connection_over", "The connection is over.")
            return
        found.asks += 1
        if found.asks > ASKS_MAX:
            self._fail("it lied: too many asks")
            return
        self._spawn(found, self._asked(found, message))

    async def _asked(self, connection: _Connection, message: Request) -> None:
        try:
            decision = await connection.gate_side.request(message.method, message.path)
        except Refused as refused:
            self._refuse(message.ask, refused.code, refused.text, refused.rule)
            return
        except ClocheError as bad:
            self._refuse(message.ask, bad.code, bad.message)
            return
        finally:
            connection.asks -= 1
        if decision.effect is not Effect.ALLOW:
            self._refuse(message.ask, decision.code, decision.text, decision.rule)
            return
        verdict = {"allow": True, "status": 200, "code": decision.code, "text": decision.text, "rule": decision.rule}
        self.tell({"t": "verdict", "ask": message.ask, **verdict})

    def _refuse(self, ask: int, code: str, text: str, rule: str = "") -> None:
        verdict = {"allow": False, "status": DENIED_STATUS, "code": code, "text": text, "rule": rule}
        self.tell({"t": "verdict", "ask": ask, **verdict})

    def _denied(self, message: Denied) -> None:
        if (found := self._of(message.conn)) is not None and self._is_reported(found):
            method = None if message.method is None else escaped(message.method, 32)
            path = None if message.path is None else escaped(message.path, 1024)
            found.gate_side.denied(message.code, escaped(message.text), method, path)

    def _is_reported(self, connection: _Connection) -> bool:
        """Each becomes a record on disk: a flood of them is counted."""
        if not self._reports.take(time.monotonic()):
            self._unreported += 1
            return False
        if self._unreported:
            count, self._unreported = self._unreported, 0
            text = f"{count} more were reported faster than they are recorded"
            connection.gate_side.denied("rate_limited", text, None, None)
        return True

    def _closed(self, message: Closed) -> None:
        if self._of(message.conn) is not None:
            self.used_at = time.monotonic()
            _let_go(self._connections.pop(message.conn))

    def _spawn(self, connection: _Connection, work: Coroutine[Any, Any, None]) -> None:
        """Ends with the connection. What a step did not expect ends everything: it must not hang unanswered."""
        task = asyncio.create_task(work, name="interceptor ask")
        connection.tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            connection.tasks.discard(task)
            if not task.cancelled() and (bad := task.exception()) is not None:
                _log.error("a question of the interceptor failed", exc_info=bad)
                self._fail(f"a question failed: {type(bad).__name__}")

        task.add_done_callback(done)


def _let_go(connection: _Connection) -> None:
    for task in tuple(connection.tasks):
        task.cancel()
    try:
        connection.gate_side.closed()
    except Exception as bad:  # a defect of one connection's gate must not keep the others from being told
        _log.error("a gate failed at the end of a connection", exc_info=bad)


def _pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    return ours, theirs
