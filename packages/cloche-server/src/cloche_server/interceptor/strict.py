"""What is refused of a message's form, beyond what mitmproxy refuses. Pure.

Two readers that take one message differently are how requests are smuggled; so whatever can be read in two ways is not
passed on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from .binding import Target

HEAD_BYTES_MAX: Final = 64 << 10
HEADERS_MAX: Final = 200
PATH_BYTES_MAX: Final = 8 << 10
METHOD_BYTES_MAX: Final = 32
_HEAD_END: Final = b"\r\n\r\n"
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BAD_TARGET: Final = re.compile(rb"[\x00-\x20\x7f#\\]")
_BARE_LINE_END: Final = re.compile(rb"(?<!\r)\n|\r(?!\n)")
_METHOD: Final = re.compile(rb"[A-Z][A-Z-]*")
_REQUEST_LINE: Final = re.compile(rb"[!-~]+ [!-\xff]+ HTTP/([0-9]\.[0-9])")
_FRAMING: Final = re.compile(
    rb"\r\n(content-length|transfer-encoding)[ \t]*:[ \t]*([^\r]*?)[ \t]*(?=\r)", re.IGNORECASE
)
_LENGTH: Final = re.compile(rb"0|[1-9][0-9]{0,17}")
_DECODINGS_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a message does not go on; `status` is what the client gets."""

    status: int
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it was parsed."""

    version: str
    method: bytes
    scheme: bytes
    authority: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]


def raw_head(data: bytes) -> Refusal | None:
    """Judges the bytes of an HTTP/1 head, complete or not, before anything is normalised."""
    end = data.find(_HEAD_END)
    head = data if end < 0 else data[: end + 2]
    if len(head) > HEAD_BYTES_MAX:
        return Refusal(431, "head_too_large", f"the head of a request may have {HEAD_BYTES_MAX} bytes")
    checked = head[:-1] if end < 0 and head.endswith(b"\r") else head
    if _BARE_LINE_END.search(checked):
        return Refusal(400, "smuggling", "a line of the head does not end with CR LF")
    if b"\x00" in head:
        return Refusal(400, "smuggling", "a NUL byte stood in the head")
    if b"\r\n " in head or b"\r\n\t" in head:
        return Refusal(400, "smuggling", "a header went on in the next line")
    return _request_line(head) or _framing(head)


def _request_line(head: bytes) -> Refusal | None:
    line, found, _ = head.lstrip(b"\r\n").partition(b"\r\n")
    if not found:
        return None
    parts = _REQUEST_LINE.fullmatch(line)
    if parts is None:
        return Refusal(400, "bad_request_line", "the request line is not: METHOD target HTTP/1.1")
    if parts[1] not in (b"1.0", b"1.1"):
        return Refusal(505, "http_version", "the version must be HTTP/1.1 or HTTP/2")
    return None


def _framing(head: bytes) -> Refusal | None:
    found = _FRAMING.findall(head)
    if len(found) > 1:
        return Refusal(400, "smuggling", "more than one header says how long the body is")
    for name, value in found:
        is_length = name.lower() == b"content-length"
        if not (_LENGTH.fullmatch(value) if is_length else value.lower() == b"chunked"):
            return Refusal(400, "smuggling", "the header that says how long the body is has another form than it may")
    return None


def request(asked: Asked, target: Target) -> Refusal | None:
    """Judges a request: that its form is one that nobody reads differently, and that it is for `target`."""
    return _form(asked) or _authority(asked, target) or _target_form(asked.target)


def _form(asked: Asked) -> Refusal | None:
    if asked.version not in ("HTTP/1.1", "HTTP/1.0", "HTTP/2.0"):
        return Refusal(505, "http_version", "the version must be HTTP/1.1 or HTTP/2")
    if asked.method == b"CONNECT":
        return Refusal(405, "connect_inside", "CONNECT inside an intercepted connection")
    if len(asked.method) > METHOD_BYTES_MAX or not _METHOD.fullmatch(asked.method):
        return Refusal(400, "bad_method", "the method must be a word in capital letters")
    if len(asked.headers) > HEADERS_MAX:
        return Refusal(431, "head_too_large", f"a request may have {HEADERS_MAX} headers")
    if sum(len(name) + len(value) for name, value in asked.headers) > HEAD_BYTES_MAX:
        return Refusal(431, "head_too_large", f"the head of a request may have {HEAD_BYTES_MAX} bytes")
    if any(_CONTROL.search(value) for _, value in asked.headers):
        return Refusal(400, "smuggling", "a control character stood in a header")
    if asked.version == "HTTP/1.0" and asked.all(b"transfer-encoding"):
        return Refusal(400, "smuggling", "Transfer-Encoding in HTTP/1.0")
    codings = asked.all(b"transfer-encoding")
    if codings and [coding.strip().lower() for coding in codings] != [b"chunked"]:
        return Refusal(400, "smuggling", "the only transfer coding of a request is chunked")
    if asked.version == "HTTP/2.0" and (asked.all(b"upgrade") or asked.all(b"connection")):
        return Refusal(400, "smuggling", "a header of HTTP/1 stood in an HTTP/2 request")
    return None


_OVERRIDES: Final = frozenset({b"x-http-method-override", b"x-http-method", b"x-method-override"})


def other_methods(asked: Asked) -> tuple[str, ...] | Refusal:
    """Methods that headers ask a server to take the request for: they must be allowed as well."""
    found = {value.strip().upper() for name, value in asked.headers if name.lower() in _OVERRIDES} - {asked.method}
    if len(found) > 1 or not all(len(each) <= METHOD_BYTES_MAX and _METHOD.fullmatch(each) for each in found):
        return Refusal(400, "smuggling", "headers ask for several other methods, or for one that is none")
    return tuple(each.decode() for each in found)


def _authority(asked: Asked, target: Target) -> Refusal | None:
    hosts = asked.all(b"host")
    if asked.version == "HTTP/2.0":
        names = [asked.authority, *hosts] if asked.authority else hosts
        if asked.scheme != (b"https" if target.tls else b"http"):
            return Refusal(421, "authority_mismatch", ":scheme is not the connection's")
        what = ":authority"
    else:
        if asked.authority or not asked.target.startswith((b"/", b"*")):
            return Refusal(421, "authority_mismatch", "a target in absolute form inside an intercepted connection")
        names, what = hosts, "Host"
        if len(hosts) != 1:
            return Refusal(400, "authority_mismatch", "a request must have one Host header")
    if not names or any(not _is_host(name, target) for name in names):
        return Refusal(421, "authority_mismatch", f"{what} is not {target.host}, for which this connection was opened")
    return None


def _is_host(name: bytes, target: Target) -> bool:
    host = f"[{target.host}]" if ":" in target.host else target.host
    allowed = {f"{host}:{target.port}"}
    if target.port == (443 if target.tls else 80):
        allowed.add(host)
    return name.decode("latin-1").lower() in allowed


def _target_form(target: bytes) -> Refusal | None:
    path = target.partition(b"?")[0]
    if len(path) > PATH_BYTES_MAX:
        return Refusal(414, "path_too_long", f"a path may have {PATH_BYTES_MAX} bytes")
    if _BAD_TARGET.search(target) or not (target.startswith(b"/") or target == b"*"):
        return Refusal(400, "bad_path", "the path has a character that a path may not have, or no / at its start")
    if has_dot_segment(path):
        return Refusal(400, "bad_path", "the path has a segment . or .., plain or encoded")
    return None


def has_dot_segment(path: bytes) -> bool:
    """Whether some server could read the path as another one: `/a/../b`, `/a/%2e%2e/b`, `/a/..;x/b`."""
    text = path.decode("latin-1")
    for _ in range(_DECODINGS_MAX):
        if any(part.partition(";")[0] in (".", "..") for part in re.split(r"[/\\]", text)):
            return True
        if "%" not in text:
            return False
        text = unquote(text, "latin-1")
    return any(part.partition(";")[0] in (".", "..") for part in re.split(r"[/\\]", text))


def response_headers(headers: tuple[tuple[bytes, bytes], ...]) -> Refusal | None:
    """Judges the head of an answer."""
    if any(_CONTROL.search(name) or _CONTROL.search(value) for name, value in headers):
        return Refusal(502, "bad_response", "the server sent a control character in a header")
    codings = [value.strip().lower() for name, value in headers if name.lower() == b"transfer-encoding"]
    if codings not in ([], [b"chunked"]):
        return Refusal(502, "bad_response", "the server sent a transfer coding other than chunked")
    return None


_DROPPED: Final = frozenset({b"alt-svc", b"sec-websocket-extensions"})


def passed_on(headers: tuple[tuple[bytes, bytes], ...], *, websocket: bool) -> tuple[tuple[bytes, bytes], ...]:
    """Request headers without offers of other protocols: `Upgrade` to anything but WebSocket, WebSocket's compression."""
    dropped = {b"sec-websocket-extensions", b"http2-settings", b"proxy-connection", b"proxy-authorization"}
    if websocket:
        return tuple((name, value) for name, value in headers if name.lower() not in dropped)
    dropped.add(b"upgrade")
    kept = []
    for name, value in headers:
        if name.lower() in dropped:
            continue
        if name.lower() == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            wanted = [token for token in tokens if token.lower() not in (b"upgrade", b"http2-settings")]
            if wanted:
                kept.append((name, b", ".join(wanted)))
            continue
        kept.append((name, value))
    return tuple(kept)


def answered(headers: tuple[tuple[bytes, bytes], ...]) -> tuple[tuple[bytes, bytes], ...]:
    """Response headers without offers of other ways to the server."""
    return tuple((name, value) for name, value in headers if name.lower() not in _DROPPED)
