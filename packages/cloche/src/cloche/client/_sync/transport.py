# Made by tools/unasync.py from packages/cloche/src/cloche/client/_async/transport.py: edit that one.
"""Connections to one target, kept alive and used again; what goes wrong on them is one of our errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import httpx2

from cloche.client._failures import PATIENCE_KNOWN_S, PATIENCE_NEW_S, Patience, refusal, translate
from cloche.client._target import Target, choose_target
from cloche.wire.errors import ClocheError

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

REQUEST_TIMEOUT_S: Final = 60.0
CONNECT_TIMEOUT_S: Final = 5.0
STREAM_SILENCE_S: Final = 45.0
"""The node beats every 15 s: after three missed ones the connection is taken for dead."""
KEEP_ALIVE_S: Final = 30.0
WS_MESSAGE_BYTES_MAX: Final = 8 * 1024 * 1024
ERROR_BYTES_MAX: Final = 1024 * 1024

Query = Mapping[str, Any]
Content = bytes | Iterator[bytes]
_FAILURES: Final = (httpx2.HTTPError, httpx2.StreamError, OSError)


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    body: bytes


@dataclass(frozen=True)
class OpenAnswer:
    """An answer that is still coming."""

    headers: httpx2.Headers
    parts: Iterator[bytes]


class Transport:
    """Requests, streams and WebSockets to one target."""

    def __init__(self, target: Target | None = None, *, request_timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        self.target = choose_target() if target is None else target
        self.request_timeout_s = request_timeout_s
        self._has_answered = False
        self._http = httpx2.HTTPTransport(
            uds=self.target.socket,
            verify=self.target.url.startswith("https://"),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=16, keepalive_expiry=KEEP_ALIVE_S),
        )
        self._headers = {"user-agent": "cloche-python"}
        if self.target.api_key is not None:
            self._headers["authorization"] = f"Bearer {self.target.api_key}"

    def patience(self) -> Patience:
        return Patience(lambda: PATIENCE_KNOWN_S if self._has_answered else PATIENCE_NEW_S)

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        content: Content = b"",
        content_type: str = "application/json",
        key: str | None = None,
        timeout_s: float | None = None,
        may_repeat: bool = True,
    ) -> Answer:
        """A whole answer, or an error. Repeated after a lost connection when that is safe: no POST without `key`."""
        headers = {"content-type": content_type} if content else {}
        if key is not None:
            headers["idempotency-key"] = key
        may_repeat = may_repeat and isinstance(content, bytes) and (method != "POST" or key is not None)
        patience = self.patience()
        while True:
            try:
                with self.stream(
                    method, path, query=query, content=content, headers=headers, timeout_s=timeout_s
                ) as answer:
                    return Answer(_whole(answer.parts))
            except Lost as lost:
                if lost.failure.code == "time_out" or not (may_repeat or lost.unsent):
                    raise lost.failure from lost.__cause__
                time.sleep(patience.delay_s(lost.failure))

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        content: Content = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[OpenAnswer]:
        """An answer as it comes. What breaks the connection, here or while reading, is raised as `Lost`."""
        request = self._build(method, path, query, content, headers, timeout_s)
        try:
            response = self._http.handle_request(request)
        except _FAILURES as raised:
            unsent = isinstance(raised, (httpx2.ConnectError, httpx2.ConnectTimeout))
            raise Lost(translate(raised, self.target), unsent=unsent) from raised
        self._has_answered = True
        try:
            if response.status_code >= 400:
                body = self._error_body(response)
                raise refusal(response.status_code, body, response.headers)
            yield OpenAnswer(response.headers, self._parts(response))
        finally:
            self._close(response)

    def _build(
        self,
        method: str,
        path: str,
        query: Query | None,
        content: Content,
        headers: Mapping[str, str] | None,
        timeout_s: float | None,
    ) -> httpx2.Request:
        url = self.target.url + path
        if query:
            url += "?" + _encoded(query)
        read_s = self.request_timeout_s if timeout_s is None else timeout_s
        times = {"connect": CONNECT_TIMEOUT_S, "read": read_s, "write": read_s, "pool": read_s}
        return httpx2.Request(
            method, url, headers={**self._headers, **(headers or {})}, content=content, extensions={"timeout": times}
        )

    def _parts(self, response: httpx2.Response) -> Iterator[bytes]:
        assert isinstance(response.stream, httpx2.SyncByteStream)
        try:
            yield from response.stream
        except _FAILURES as raised:
            raise Lost(translate(raised, self.target), unsent=False) from raised

    def _error_body(self, response: httpx2.Response) -> bytes:
        body = b""
        for part in self._parts(response):
            body += part
            if len(body) > ERROR_BYTES_MAX:
                break
        return body

    def _close(self, response: httpx2.Response) -> None:
        assert isinstance(response.stream, httpx2.SyncByteStream)
        try:
            response.stream.close()
        except _FAILURES:
            return  # it is closed either way

    def open_socket(self, path: str, query: Query | None = None) -> ClientConnection:
        """A WebSocket, or the error that the node answered instead."""
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.sync.client import connect, unix_connect

        url = self.target.url.replace("http", "ws", 1) + path
        if query:
            url += "?" + _encoded(query)
        options: dict[str, Any] = {
            "additional_headers": {name: value for name, value in self._headers.items() if name == "authorization"},
            "compression": None,
            "max_size": WS_MESSAGE_BYTES_MAX,
            "open_timeout": self.request_timeout_s,
            "proxy": None,
        }
        try:
            if self.target.socket is not None:
                socket: ClientConnection = unix_connect(self.target.socket, url, **options).__enter__()
            else:
                socket = connect(url, **options).__enter__()
        except InvalidStatus as raised:
            answer = raised.response
            raise refusal(answer.status_code, bytes(answer.body or b""), dict(answer.headers.raw_items())) from None
        except (WebSocketException, OSError, TimeoutError) as raised:
            raise translate(raised, self.target) from raised
        return socket

    def close(self) -> None:
        try:
            self._http.close()
        except _FAILURES:
            return


class Lost(Exception):
    """The connection is gone; `failure` says it in our words. Does not leave this package."""

    def __init__(self, failure: ClocheError, *, unsent: bool) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.unsent = unsent


def _whole(parts: Iterator[bytes]) -> bytes:
    body = bytearray()
    for part in parts:
        body += part
    return bytes(body)


def new_key() -> str:
    """An idempotency key: one per call, the same for its repeats."""
    return uuid.uuid4().hex


def _encoded(query: Query) -> str:
    """Names of files that are not UTF-8 travel as the bytes they are."""
    return urlencode(
        {name: _text(value) for name, value in query.items() if value is not None}, errors="surrogateescape"
    )


def _text(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
