"""The process: what the gate says is kept here, each connection is run, and all of it ends with the control channel."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import socket
import sys
from typing import Any, Final

from . import flow, websocket
from .binding import Sandbox, Target, sandbox_of
from .certificates import Authority, Roots
from .connection import READ_BYTES, Intercepted, Refused
from .control import Control, Message
from .forms import value_forms
from .judge import Judge, Verdict
from .options import Options
from .strict import METHOD_BYTES_MAX

_PR_SET_DUMPABLE: Final = 4
_CLOSES_PER_COLLECTION: Final = 64
_ASKS_MAX: Final = 256
_DIALS_MAX: Final = 32
_TEXT_CHARS_MAX: Final = 500
_PATH_CHARS_MAX: Final = 1024

log = logging.getLogger("interceptor")


class Link:
    """One connection's end of the control channel."""

    def __init__(self, service: Service, number: int, sandbox: str, lineage: str) -> None:
        self._service = service
        self.number = number
        self.sandbox = sandbox
        self.lineage = lineage
        self.task: asyncio.Task[None] | None = None
        self.handler: Intercepted | None = None
        self._asks: set[int] = set()
        self._dials: set[int] = set()

    async def ask(self, method: str, path: str) -> tuple[int, Verdict]:
        if len(self._asks) >= _ASKS_MAX:
            raise ConnectionError("too many requests wait on one connection")
        number, answer = self._service.expect()
        self._asks.add(number)
        try:
            self._service.send("request", ask=number, conn=self.number, method=method, path=path)
            return number, await answer
        finally:
            self._asks.discard(number)
            self._service.expect_no_more(number)

    async def dial(self) -> socket.socket:
        if len(self._dials) >= _DIALS_MAX:
            raise Refused("too many connections to one server")
        number, answer = self._service.expect()
        self._dials.add(number)
        try:
            self._service.send("dial", dial=number, conn=self.number)
            found: socket.socket = await answer
            return found
        finally:
            self._dials.discard(number)
            self._service.expect_no_more(number)

    def answered(self, ask: int, status: int) -> None:
        self._service.send("response", ask=ask, conn=self.number, status=status)

    def alert(self, kind: str, where: str, secret: str) -> None:
        self._service.send("alert", conn=self.number, kind=kind, where=where, secret=secret)

    def denied(self, ask: int | None, code: str, text: str, method: str | None, path: str | None) -> None:
        method = None if method is None else method[:METHOD_BYTES_MAX]
        path = None if path is None else path[:_PATH_CHARS_MAX]
        text = text[:_TEXT_CHARS_MAX]
        self._service.send("denied", conn=self.number, ask=ask, code=code, text=text, method=method, path=path)

    def wait_no_more(self) -> None:
        """The connection is over: nobody waits for these answers."""
        for number in (*self._asks, *self._dials):
            self._service.give_up(number)

    def end(self) -> None:
        if self.handler is not None:
            self.handler.end()
        if self.task is not None:
            self.task.cancel()


class Service:
    """All state of the process."""

    def __init__(self, channel: socket.socket) -> None:
        self._options = Options()
        self._authorities: dict[str, Authority] = {}
        self._sandboxes: dict[str, Sandbox] = {}
        self._roots = Roots("")
        self._links: dict[int, Link] = {}
        self._expected: dict[int, asyncio.Future[Any]] = {}
        self._last_number = 0
        self._closes = 0
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._control = Control(channel, self._received, self._ended)
        self.send("ready")

    def send(self, kind: str, /, **fields: Any) -> None:
        self._control.send({"t": kind, **fields})

    def expect(self) -> tuple[int, asyncio.Future[Any]]:
        """A number for a question, and what will be its answer."""
        self._last_number += 1
        answer = asyncio.get_running_loop().create_future()
        self._expected[self._last_number] = answer
        return self._last_number, answer

    def expect_no_more(self, number: int) -> None:
        self._expected.pop(number, None)

    def give_up(self, number: int) -> None:
        if (answer := self._expected.get(number)) is not None:
            answer.cancel()

    def _ended(self, why: str) -> None:
        if not self.over.done():
            self.over.set_result(why)

    def _received(self, message: Message, descriptor: socket.socket | None) -> None:
        kind = message.get("t")
        if kind == "open":
            assert descriptor is not None
            self._open(message, descriptor)
        elif kind == "verdict":
            self._verdict(message)
        elif kind == "dialled":
            self._dialled(message, descriptor)
        elif kind == "authority":
            self._authorities[message["lineage"]] = Authority(message["cert"].encode(), message["key"].encode())
        elif kind == "sandbox":
            self._sandboxes[message["id"]] = sandbox_of(message, self._sandboxes.get(message["id"]))
        elif kind == "trust":
            self._roots = Roots(message["pem"])
        elif kind == "forget":
            self._sandboxes.pop(message["id"], None)
            self._end_links(lambda link: link.sandbox == message["id"])
        elif kind == "forget_lineage":
            self._authorities.pop(message["lineage"], None)
            self._end_links(lambda link: link.lineage == message["lineage"])
        else:
            raise ValueError("a message of an unknown kind")

    def _end_links(self, ends: Any) -> None:
        for link in [link for link in self._links.values() if ends(link)]:
            link.end()
        value_forms.cache_clear()

    def _verdict(self, message: Message) -> None:
        answer = self._expected.get(message["ask"])
        if answer is not None and not answer.done():
            status = message.get("status") or 403
            answer.set_result(
                Verdict(
                    allow=message["allow"] is True,
                    status=status if 400 <= status <= 599 else 403,
                    code=str(message.get("code") or "denied"),
                    text=str(message.get("text") or "the policy does not allow this request"),
                )
            )

    def _dialled(self, message: Message, descriptor: socket.socket | None) -> None:
        answer = self._expected.get(message["dial"])
        if answer is None or answer.done():
            if descriptor is not None:
                descriptor.close()
        elif descriptor is None:
            answer.set_exception(Refused(str(message["error"])))
        else:
            answer.set_result(descriptor)

    def _open(self, message: Message, descriptor: socket.socket) -> None:
        link = Link(self, message["conn"], message["sandbox"], message["lineage"])
        self._links[link.number] = link
        target = Target(message["host"], message["port"], message["tls"])
        link.task = asyncio.get_running_loop().create_task(self._run(link, target, descriptor))

    async def _run(self, link: Link, target: Target, descriptor: socket.socket) -> None:
        try:
            streams = await asyncio.open_unix_connection(sock=descriptor, limit=READ_BYTES)
            link.handler = Intercepted(
                streams,
                self._options,
                target,
                judge=Judge(target, lambda: self._sandboxes.get(link.sandbox), link),
                dialler=link,
                authority=self._authorities.get(link.lineage),
                roots=self._roots,
            )
            await link.handler.run()
        finally:
            self._links.pop(link.number, None)
            self.send("closed", conn=link.number)
            link.wait_no_more()
            link.handler = None
            self._collect()

    def _collect(self) -> None:
        """A connection's objects refer to each other in circles; they are large, so they are not left to chance."""
        self._closes += 1
        if self._closes % _CLOSES_PER_COLLECTION == 0 or not self._links:
            asyncio.get_running_loop().call_soon(_collect_garbage)


_LIBC: Final = ctypes.CDLL(None)


def _collect_garbage() -> None:
    gc.collect()
    _LIBC.malloc_trim(0)


def _quiet(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """asyncio would write the exception's text, which may quote what was sent."""
    log.warning("in the event loop: %s", type(context.get("exception")).__name__)


async def _serve(channel: socket.socket) -> None:
    asyncio.get_running_loop().set_exception_handler(_quiet)
    why = await Service(channel).over
    log.warning("over: %s", why)
    os._exit(0)  # at once: no connection may outlive the channel


def main() -> None:
    """Serves the channel on descriptor 0 until it ends."""
    # Secrets are in memory here: no core file, no attaching by the same user.
    _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    logging.getLogger("mitmproxy").disabled = True
    flow.install()
    websocket.install()
    channel = socket.socket(fileno=os.dup(0))
    gc.freeze()
    asyncio.run(_serve(channel))
