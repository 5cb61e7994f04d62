"""Answers that the interceptor gives itself: short plain text that says what happened and why."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Final

from mitmproxy import http
from mitmproxy.net.http import http1

_REASON_CHARS_MAX: Final = 200
_TEXT_CHARS_MAX: Final = 2000


def answer(status: int, code: str, text: str, *, http2: bool) -> http.Response:
    """The reason in the status line, a header and the body, since every client shows another of them."""
    text = _safe(text)[:_TEXT_CHARS_MAX]
    headers = {"content-type": "text/plain; charset=utf-8", "x-cloche-denied": _safe(code)[:64]}
    if not http2:
        headers["connection"] = "close"
    response = http.Response.make(status, f"Cloche: {text}\n".encode(), headers)
    response.data.http_version = b"HTTP/2.0" if http2 else b"HTTP/1.1"
    response.data.reason = b"" if http2 else f"Cloche: {text}"[:_REASON_CHARS_MAX].encode("ascii", "replace")
    return response


def raw_answer(status: int, code: str, text: str) -> bytes:
    """The same as bytes of HTTP/1."""
    return bytes(http1.assemble_response(answer(status, code, text, http2=False)))


def stock_answer(status_code: int, message: str = "") -> bytes:
    """In the place of mitmproxy's own page. Its message may quote what was sent, so it is not shown."""
    return raw_answer(status_code, "bad_request", "the request could not be read" if status_code < 500 else "no answer")


def _safe(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
