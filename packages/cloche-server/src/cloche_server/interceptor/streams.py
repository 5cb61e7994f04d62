"""One request and its answer, on mitmproxy's HTTP stream, with refusals at any point that never hoard a body."""
# mypy: disable-error-code="import-not-found"
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from mitmproxy.proxy.context import Context
from mitmproxy.proxy.layers.http import (
    DropStream,
    ErrorCode,
    HttpRequestHook,
    HttpStream,
    RequestData,
    RequestEndOfMessage,
    RequestHeaders,
    RequestProtocolError,
    RequestTrailers,
    ResponseData,
    ResponseEndOfMessage,
    ResponseHeaders,
    ResponseProtocolError,
    SendHttp,
)

from .answers import answer
from .judge import Judge
from .strict import Refusal


class JudgedStream(HttpStream):
    """Asks its judge at each step. A refusal is answered at once; what the client still sends is thrown away."""

    def __init__(self, context: Context, stream_id: int, judge: Judge) -> None:
        super().__init__(context, stream_id)
        self._judge = judge
        self._has_body = True

    def check_invalid(self, request: bool) -> Generator[Any, Any, bool]:
        if request:
            refusal = self._judge.request_form(self.flow, has_body=self._has_body)
        else:
            refusal = self._judge.response_form(self.flow)
        if refusal is None:
            return False
        if not request:
            self.flow.response = None
            yield from self._leave_server()
        yield from self._refuse(refusal)
        return True

    def state_wait_for_request_headers(self, event: Any) -> Iterator[Any]:
        self._has_body = not event.end_stream
        yield from super().state_wait_for_request_headers(event)
        if (refusal := self._judge.refusal(self.flow)) is not None and self.client_state != self.state_refused:
            yield from self._refuse(refusal)

    def start_request_stream(self) -> Iterator[Any]:
        if (yield from self.make_server_connection()):
            yield SendHttp(RequestHeaders(self.stream_id, self.flow.request, end_stream=False), self.context.server)
            self.client_state = self.state_stream_request_body

    def state_stream_request_body(self, event: Any) -> Iterator[Any]:
        if isinstance(event, RequestTrailers):
            self.flow.request.trailers = event.trailers
            return
        ended = isinstance(event, RequestEndOfMessage)
        for chunk in self._judge.request_body(self.flow, b"" if ended else event.data):
            yield SendHttp(RequestData(self.stream_id, chunk), self.context.server)
        if ended:
            yield HttpRequestHook(self.flow)
        if (refusal := self._judge.refusal(self.flow)) is not None:
            yield from self._leave_server()
            yield from self._refuse(refusal, over=ended)
        elif ended:
            self.client_state = self.state_done
            if self.flow.request.trailers:
                yield SendHttp(RequestTrailers(self.stream_id, self.flow.request.trailers), self.context.server)
            yield SendHttp(event, self.context.server)
            if self.server_state == self.state_done:
                yield from self.flow_done()

    def state_stream_response_body(self, event: Any) -> Iterator[Any]:
        yield from super().state_stream_response_body(event)
        if (
            self.server_state == self.state_stream_response_body
            and (refusal := self._judge.refusal(self.flow)) is not None
        ):
            over = self.client_state == self.state_done
            yield from self._leave_server()
            yield from self._refuse(refusal, over=over)

    def state_refused(self, event: Any) -> Iterator[Any]:
        """The client was answered: what it still sends is thrown away."""
        if isinstance(event, RequestEndOfMessage):
            yield DropStream(self.stream_id)

    def handle_protocol_error(self, event: Any) -> Iterator[Any]:
        if self.client_state == self.state_refused:
            yield DropStream(self.stream_id)
        elif (
            isinstance(event, ResponseProtocolError)
            and event.code is not ErrorCode.HTTP_1_1_REQUIRED
            and self.flow.response is None
            and self.client_state != self.state_errored
        ):
            over = self.client_state == self.state_done
            yield from self._refuse(self._judge.upstream_failed(self.flow, _told(event)), over=over)
        else:
            yield from super().handle_protocol_error(event)

    def _refuse(self, refusal: Refusal, *, over: bool = False) -> Iterator[Any]:
        """`over`: the client's side of the stream has ended."""
        answered = self.server_state not in (self.state_uninitialized, self.state_wait_for_response_headers)
        self.client_state = self.state_refused
        self.server_state: Any = self.state_errored
        self.flow.live = False
        if answered:
            error = ResponseProtocolError(self.stream_id, refusal.code, ErrorCode.CANCEL)
            yield SendHttp(error, self.context.client)
        else:
            request = self.flow.request
            response = answer(refusal.status, refusal.code, refusal.text, http2=request.is_http2)
            self.flow.response = response
            yield SendHttp(ResponseHeaders(self.stream_id, response, end_stream=False), self.context.client)
            if response.raw_content and request.method != "HEAD":
                yield SendHttp(ResponseData(self.stream_id, response.raw_content), self.context.client)
            yield SendHttp(ResponseEndOfMessage(self.stream_id), self.context.client)
        if over:
            yield DropStream(self.stream_id)

    def _leave_server(self) -> Iterator[Any]:
        yield SendHttp(RequestProtocolError(self.stream_id, "refused", ErrorCode.CANCEL), self.context.server)


def _told(event: Any) -> str:
    """Why there is no answer; what a server sent is not quoted."""
    if event.code is ErrorCode.CONNECT_FAILED:
        return str(event.message)
    return "the server ended the connection, or sent what is not HTTP"
