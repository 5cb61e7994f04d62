"""What a client gets to read when the gate says no (NET-7), in the words of its own protocol."""

from __future__ import annotations

from cloche_server.egress.attempt import Refused
from cloche_server.egress.text import escaped

TLS_ACCESS_DENIED = bytes.fromhex("15030100020231")
_STATUS = {
    "unresolved": 502,
    "unreachable": 502,
    "rate_limited": 429,
    "too_many_connections": 429,
    "bytes_used_up": 429,
    "bad_request": 400,
    "timed_out": 408,
    "interceptor_missing": 503,
    "internal": 500,
}
_REASON_CHARS_MAX = 160
_LINE_CHARS_MAX = 400


def http(refused: Refused, *, sandbox: str, host: str = "", port: int = 0, status: int | None = None) -> bytes:
    """Reason in the status line, a header and the body: a client shows one of them."""
    text = _line(refused.text)
    body = f"Cloche: {text}\nCode: {refused.code}. Rule: {_line(refused.rule)}.\n"
    if host and refused.code in _CAN_BE_ALLOWED:
        body += f"A person can allow it from outside: cloche egress allow {sandbox} {_shown(host, port)} --for 10m\n"
    content = body.encode()
    return (
        f"HTTP/1.1 {status or _STATUS.get(refused.code, 403)} Cloche: {text[:_REASON_CHARS_MAX]}\r\n"
        f"X-Cloche-Denied: {refused.code}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    ).encode() + content


def for_person(refused: Refused, *, sandbox: str, host: str, port: int) -> str:
    """For the record: what happened, and how it can be allowed."""
    text = _line(refused.text)
    if host and refused.code in _CAN_BE_ALLOWED:
        return f"{text} (allow: cloche egress allow {sandbox} {_shown(host, port)} --for 10m)"
    return text


_CAN_BE_ALLOWED = frozenset({"no_rule", "port_not_allowed", "needs_name"})


def _shown(host: str, port: int) -> str:
    name = escaped(host, 253)
    bracketed = f"[{name}]" if ":" in name else name
    return bracketed if port in (0, 80, 443) else f"{bracketed}:{port}"


def _line(text: str) -> str:
    """One line of plain ASCII: it goes into a status line."""
    return escaped(text, _LINE_CHARS_MAX).encode("ascii", "backslashreplace").decode()
