"""Requests for tests, and the events that a reader makes of their bytes."""

from typing import Any

from cloche_server.egress.fields import REASONS, BadRequest
from cloche_server.egress.heads import Body, RequestReader


def head(line: str, *fields: str, host: str | None = "a.example") -> bytes:
    every = [line, *([f"Host: {host}"] if host is not None else []), *fields]
    return ("\r\n".join(every) + "\r\n\r\n").encode("latin-1")


GET = head("GET http://a.example/x HTTP/1.1")


def taken(data: bytes, size: int | None = None) -> list[Any]:
    """The events of these bytes, fed in pieces; parts of a body that follow each other are one. An error is the last."""
    reader = RequestReader()
    events: list[Any] = []
    for at in range(0, len(data), size or len(data) or 1):
        reader.feed(data[at : at + (size or len(data))])
        try:
            while (event := reader.next_event()) is not None:
                if isinstance(event, Body) and events and isinstance(events[-1], Body):
                    events[-1] = Body(events[-1].data + event.data)
                else:
                    events.append(event)
        except BadRequest as refused:
            return [*events, refused.reason]
    return events


CHUNKED = head("POST / HTTP/1.1", "Transfer-Encoding: Chunked")


def refusal(data: bytes) -> str:
    reasons = {str(taken(data, size)[-1]) for size in (None, 1, 3)}
    assert len(reasons) == 1, reasons
    (reason,) = reasons
    assert reason in REASONS, reason
    return reason
