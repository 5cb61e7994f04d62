"""What is asked and done at each step of a request on one connection. Knows mitmproxy's flows, no sockets."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from mitmproxy import http
from mitmproxy.net.http.validate import validate_headers

from .answers import answer
from .binding import Sandbox, Target
from .inflate import BadEncoding, Inflater, coding_of
from .places import BodyWatch, Guard, Head, Misplaced, ValueWatch
from .strict import Asked, Refusal, answered, other_methods, passed_on, request, response_headers

SMALL_BODY_BYTES: Final = 64 << 10
"""A body of at most this size is looked at as a whole before any of the request goes on."""
ANSWER_BYTES_MAX: Final = 8 << 30
"""Of a compressed answer, once it is decoded."""
_EXCHANGE: Final = "cloche"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The gate's, on one request."""

    allow: bool
    status: int
    code: str
    text: str


class Gate(Protocol):
    """The other end of the control channel, for one connection."""

    async def ask(self, method: str, path: str) -> tuple[int, Verdict]: ...
    def answered(self, ask: int, status: int) -> None: ...
    def alert(self, kind: str, where: str, secret: str) -> None: ...
    def denied(self, ask: int | None, code: str, text: str, method: str | None, path: str | None) -> None: ...


@dataclass(slots=True)
class Exchange:
    """One request and its answer."""

    judge: Judge
    head: Head
    ask: int | None = None
    refusal: Refusal | None = None
    watch: BodyWatch | None = None
    inflater: Inflater | None = None
    messages: tuple[Guard, ValueWatch] | None = None
    """Of a WebSocket: what the server said, watched over the ends of messages."""


def exchange_of(flow: http.HTTPFlow) -> Exchange:
    """The state that goes with a flow."""
    exchange: Exchange = flow.metadata[_EXCHANGE]
    return exchange


class Judge:
    """One connection's."""

    def __init__(self, target: Target, sandbox: Callable[[], Sandbox | None], gate: Gate) -> None:
        self._target = target
        self._sandbox = sandbox
        self._gate = gate
        self._guard: tuple[Sandbox, Guard] | None = None

    @property
    def guard(self) -> Guard:
        """With what the sandbox holds now."""
        sandbox = self._sandbox()
        if sandbox is None:
            raise LookupError("the sandbox is not known")
        if self._guard is None or self._guard[0] is not sandbox:
            self._guard = (sandbox, Guard(sandbox, self._target))
        return self._guard[1]

    def denied(self, code: str, text: str) -> None:
        """Before there is a request."""
        self._gate.denied(None, code, text, None, None)

    def refusal(self, flow: http.HTTPFlow) -> Refusal | None:
        exchange = flow.metadata.get(_EXCHANGE)
        return None if exchange is None else exchange.refusal

    def request_form(self, flow: http.HTTPFlow, *, has_body: bool) -> Refusal | None:
        """First: whether the request's form is one that is passed on at all."""
        asked = flow.request
        if asked.authority and not asked.is_http2 and not self._target.tls and asked.scheme == "http":
            _to_origin_form(asked, self._target)
        fields = tuple(asked.headers.fields)
        data = asked.data
        parsed = Asked(asked.http_version, data.method, data.scheme, data.authority, data.path, fields)
        refusal, others = request(parsed, self._target), other_methods(parsed)
        if isinstance(others, Refusal):
            refusal, others = refusal or others, ()
        exchange = Exchange(self, Head(asked.method, data.path, fields, others))
        flow.metadata[_EXCHANGE] = exchange
        if not has_body and asked.headers.get("content-length", "0") != "0":
            refusal = refusal or Refusal(400, "smuggling", "a length without a body")
        try:
            validate_headers(asked)
        except ValueError:
            refusal = refusal or Refusal(400, "smuggling", "headers that two readers could take differently")
        if refusal is not None:
            self._refuse(exchange, refusal)
        return refusal

    async def requestheaders(self, flow: http.HTTPFlow) -> None:
        """The head is complete: look, ask the gate, put secrets in."""
        exchange = exchange_of(flow)
        flow.request.stream = False
        try:
            guard = self.guard
            head = guard.head(exchange.head)
            for method in exchange.head.methods:
                exchange.ask, verdict = await self._gate.ask(method, exchange.head.path)
                if not verdict.allow:
                    exchange.refusal = Refusal(verdict.status, verdict.code, verdict.text)
                    break
            else:
                # What the sandbox holds may have changed while the verdict was waited for.
                self._pass_on(flow, exchange, head if self.guard is guard else self.guard.head(exchange.head))
        except Misplaced as found:
            self._misplaced(exchange, found)
        if exchange.refusal is not None:
            flow.request.headers.pop("expect", None)

    def _pass_on(self, flow: http.HTTPFlow, exchange: Exchange, head: Head) -> None:
        asked, guard = flow.request, self.guard
        websocket = not asked.is_http2 and asked.headers.get("upgrade", "").lower() == "websocket"
        asked.headers = http.Headers(passed_on(head.headers, websocket=websocket))
        asked.data.path = head.target
        if guard.redacts:
            # Nothing but plain bytes can be redacted; without the header a server may send what it likes.
            asked.headers["accept-encoding"] = "identity"
        exchange.watch = guard.body(
            exchange.head, asked.headers.get("content-type", "").encode("utf-8", "surrogateescape")
        )
        asked.stream = True
        if exchange.watch is not None:
            self._watch_body(asked, exchange, exchange.watch)

    def _watch_body(self, asked: http.Request, exchange: Exchange, watch: BodyWatch) -> None:
        coding = coding_of(asked.headers.get("content-encoding", ""))
        if coding == "inflate":
            exchange.inflater, watch.replacer = Inflater(), None
        elif coding == "unknown":
            text = "an encoded body cannot be searched for placeholders: send it plain or with gzip"
            self._refuse(exchange, Refusal(415, "encoded_body", text))
            asked.stream = False
            return
        length = asked.headers.get("content-length")
        if length is not None and int(length) <= SMALL_BODY_BYTES:
            asked.stream = False
        elif watch.changes and length is not None:
            del asked.headers["content-length"]
            if not asked.is_http2:
                asked.headers["transfer-encoding"] = "chunked"

    def request_body(self, flow: http.HTTPFlow, data: bytes) -> list[bytes]:
        """The next piece of a body that is streamed; empty at its end. Gives what may go on."""
        exchange = exchange_of(flow)
        if exchange.refusal is not None:
            return []
        try:
            out = self._looked_at(exchange, data)
        except Misplaced as found:
            self._misplaced(exchange, found)
            return []
        except BadEncoding as found:
            self._refuse(exchange, Refusal(400, "encoded_body", str(found)))
            return []
        return [out] if out else []

    @staticmethod
    def _looked_at(exchange: Exchange, data: bytes) -> bytes:
        watch = exchange.watch
        if watch is None:
            return data
        if exchange.inflater is None:
            return watch.feed(data) if data else watch.flush()
        for piece in exchange.inflater.feed(data):
            watch.see(piece)
        if not data:
            exchange.inflater.finish()
        return data

    async def request(self, flow: http.HTTPFlow) -> None:
        """The request is complete. A small body is still here as a whole."""
        exchange = exchange_of(flow)
        content = flow.request.raw_content
        if content and exchange.watch is not None:
            out = self.request_body(flow, content) + self.request_body(flow, b"")
            flow.request.raw_content = b"".join(out)
            flow.request.headers["content-length"] = str(sum(map(len, out)))
        try:
            for name, value in flow.request.trailers.fields if flow.request.trailers else ():
                self.guard.look("a trailer", name + b": " + value)
        except Misplaced as found:
            self._misplaced(exchange, found)
        if exchange.refusal is None and flow.request.trailers and not flow.request.is_http2:
            text = "trailers behind the body of an HTTP/1 request are not passed on: use HTTP/2, or leave them out"
            self._refuse(exchange, Refusal(400, "trailers", text))
        if exchange.refusal is not None and content is not None:
            # The body was not streamed: mitmproxy sends this in the place of a server's answer.
            refused = exchange.refusal
            flow.response = answer(refused.status, refused.code, refused.text, http2=flow.request.is_http2)

    def response_form(self, flow: http.HTTPFlow) -> Refusal | None:
        """An answer's head came: whether it may go on at all."""
        exchange = exchange_of(flow)
        response = flow.response
        assert response is not None
        refusal = response_headers(tuple(response.headers.fields))
        try:
            validate_headers(response)
        except ValueError:
            refusal = refusal or Refusal(502, "bad_response", "the server's headers can be taken in two ways")
        coding = coding_of(response.headers.get("content-encoding", ""))
        if refusal is None and self.guard.redacts and coding == "unknown":
            text = "the server sent an encoded answer, in which secrets could not be seen"
            refusal = Refusal(502, "encoded_response", text)
        if refusal is not None:
            self._refuse(exchange, refusal)
        return refusal

    async def responseheaders(self, flow: http.HTTPFlow) -> None:
        """The answer goes on: without values of secrets."""
        exchange = exchange_of(flow)
        response = flow.response
        assert response is not None
        if exchange.refusal is not None:
            return
        if exchange.ask is not None:
            self._gate.answered(exchange.ask, response.status_code)
        guard = self.guard
        fields = answered(tuple(response.headers.fields))
        response.stream = True
        if guard.redacts:
            fields = guard.clean_headers(fields)
            response.data.reason = guard.clean(response.data.reason)
            response.stream = _streamed(guard.redactor())
            if coding_of(response.headers.get("content-encoding", "")) == "inflate":
                response.stream = self._looked_through(exchange, guard.value_watch())
        response.headers = http.Headers(fields)

    def _looked_through(self, exchange: Exchange, watch: ValueWatch) -> Callable[[bytes], list[bytes]]:
        """A compressed answer that nobody asked to be so. It cannot be redacted, only ended."""
        inflater = Inflater(ANSWER_BYTES_MAX)

        def piece(data: bytes) -> list[bytes]:
            if exchange.refusal is not None or not data:
                return []
            try:
                found = any(watch.sees_one(part) for part in inflater.feed(data))
            except BadEncoding as failure:
                self._refuse(exchange, Refusal(502, "encoded_response", str(failure)))
                return []
            if found:
                self._refuse(
                    exchange, Refusal(502, "encoded_response", "the encoded answer held the value of a secret")
                )
                return []
            return [data]

        return piece

    async def response(self, flow: http.HTTPFlow) -> None:
        """The answer is complete: its trailers."""
        response = flow.response
        if response is not None and response.trailers:
            response.trailers = http.Headers(self.guard.clean_headers(tuple(response.trailers.fields)))

    async def websocket_message(self, flow: http.HTTPFlow) -> None:
        """One whole message, either way."""
        assert flow.websocket is not None
        exchange = exchange_of(flow)
        message = flow.websocket.messages[-1]
        del flow.websocket.messages[:-1]  # mitmproxy keeps them all
        if not message.from_client:
            self._redact_message(exchange, message)
        elif (watch := self.guard.body(exchange.head, b"")) is not None:
            try:
                message.content = watch.feed(message.content) + watch.flush()
            except Misplaced as found:
                self._misplaced(exchange, found)
                message.drop()

    def _redact_message(self, exchange: Exchange, message: Any) -> None:
        """A message is a unit, so none is held back for the next; one that would complete a value is not given."""
        guard = self.guard
        message.content = guard.redactor().whole(message.content)
        if exchange.messages is None or exchange.messages[0] is not guard:
            exchange.messages = (guard, guard.value_watch())
        if exchange.messages[1].sees_one(message.content):
            text = "the value of a secret came in pieces, over several messages"
            self._refuse(exchange, Refusal(403, "secret_in_answer", text))
            message.drop()

    def control_payload(self, payload: bytes, *, from_client: bool) -> bytes:
        """Of a WebSocket ping, pong or close."""
        if from_client:
            self.guard.look("a WebSocket control frame", payload)
            return payload
        return self.guard.redactor().whole(payload)

    def upstream_failed(self, flow: http.HTTPFlow, why: str) -> Refusal:
        """No answer will come."""
        exchange = exchange_of(flow)
        text = f"no answer from {self._target.host}:{self._target.port}: {why}"
        exchange.refusal = Refusal(502, "upstream_failed", text)
        self._gate.denied(exchange.ask, "upstream_failed", text, exchange.head.method, exchange.head.path)
        return exchange.refusal

    def misplaced(self, flow: http.HTTPFlow, found: Misplaced) -> None:
        """Seen where no hook is: the flow ends."""
        self._misplaced(exchange_of(flow), found)

    def _misplaced(self, exchange: Exchange, found: Misplaced) -> None:
        self._gate.alert(found.kind, found.where, found.secret)
        self._refuse(exchange, Refusal(403, found.kind, found.text))

    def _refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        exchange.refusal = refusal
        self._gate.denied(exchange.ask, refusal.code, refusal.text, exchange.head.method, exchange.head.path)


def _streamed(replacer: Any) -> Callable[[bytes], list[bytes]]:
    """As mitmproxy wants it: called with b"" at the end; an empty piece must not be sent (it would end a chunked body)."""

    def piece(data: bytes) -> list[bytes]:
        out = replacer.feed(data) if data else replacer.flush()
        return [out] if out else []

    return piece


def _to_origin_form(asked: http.Request, target: Target) -> None:
    """`GET http://host/path` on a plain connection for that very host becomes `GET /path`."""
    names = {target.host, f"{target.host}:{target.port}"}
    if asked.authority.lower() in names and asked.headers.get("host", "").lower() in names:
        asked.authority = ""
