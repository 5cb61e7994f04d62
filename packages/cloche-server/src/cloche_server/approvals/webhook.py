"""Tells a server of the organisation's choice that something waits: the one file of this room that opens a socket.

The body is JSON and signed, so that the receiver knows whose word it is; it holds a token with which this one question can be
answered, once. Telling never holds the question up, is tried a few times, and ends with the question. What the server answers is
not read: an answer comes by the API.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import ipaddress
import json
import ssl
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2

from cloche.wire.approvals import Approval
from cloche.wire.errors import error

HEADER: Final = "Cloche-Signature"
ATTEMPTS_MAX: Final = 4
ATTEMPT_S_MAX: Final = 5.0
BACKOFF_S: Final = (1.0, 4.0, 15.0)
IN_FLIGHT_MAX: Final = 64
KEY_BYTES_MIN: Final = 16
_FAILURES: Final = (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, TimeoutError)

Spawn = Callable[[Coroutine[Any, Any, Any], str], "asyncio.Task[Any]"]
Told = Callable[[str, str, dict[str, Any]], None]


def signature(key: bytes, at: int, body: bytes) -> str:
    """`t=TIME,v1=HEX`: HMAC-SHA256 over `TIME.BODY`. A receiver refuses an old time."""
    digest = hmac.new(key, str(at).encode() + b"." + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


def message(approval: Approval, token: str) -> bytes:
    """What is posted. All that a guest chose in it is escaped already."""
    fields = {
        "kind": "approval.asked",
        "approval": approval.model_dump(mode="json"),
        "answer": {"path": f"/v1/approvals/answers/{token}", "body": {"answer": "approve|deny"}},
    }
    return json.dumps(fields, separators=(",", ":")).encode()


@dataclass
class Webhook:
    """Announces to one URL. `key` signs; `told` is the journal's, with the approval's id."""

    url: str
    key: bytes = field(repr=False)
    spawn: Spawn
    told: Told = lambda _kind, _approval, _detail: None
    wall: Callable[[], float] = time.time
    backoff_s: tuple[float, ...] = BACKOFF_S
    _in_flight: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        check_url(self.url)
        if len(self.key) < KEY_BYTES_MIN:
            raise error("policy_invalid", f"The webhook's key has fewer than {KEY_BYTES_MIN} bytes.")

    def announce(self, approval: Approval, token: str, is_open: Callable[[], bool]) -> None:
        """Returns at once."""
        if self._in_flight >= IN_FLIGHT_MAX:
            self.told("approval.not_announced", approval.id, {"why": "too many announcements are under way"})
            return
        self._in_flight += 1
        self.spawn(self._announce(approval.id, message(approval, token), is_open), f"webhook for {approval.id}")

    async def _announce(self, approval: str, body: bytes, is_open: Callable[[], bool]) -> None:
        try:
            why = ""
            for pause_s in (*self.backoff_s[: ATTEMPTS_MAX - 1], None):
                if not is_open():
                    return
                why = await self._post(body)
                if not why:
                    self.told("approval.announced", approval, {})
                    return
                if pause_s is not None:
                    await asyncio.sleep(pause_s)
            self.told("approval.not_announced", approval, {"why": why})
        finally:
            self._in_flight -= 1

    async def _post(self, body: bytes) -> str:
        """Why it failed; empty: the server has it. Each attempt is signed with its own time."""
        headers = {"content-type": "application/json", HEADER: signature(self.key, int(self.wall()), body)}
        try:
            async with asyncio.timeout(ATTEMPT_S_MAX):
                request = httpx2.Request("POST", self.url, content=body, headers=headers)
                trust = await asyncio.to_thread(_trust)
                # The bare transport: a client would log the address, which may hold a key.
                async with httpx2.AsyncHTTPTransport(verify=trust, trust_env=False) as transport:
                    async with aclosing(await transport.handle_async_request(request)) as answer:
                        return "" if 200 <= answer.status_code < 300 else f"the server answered {answer.status_code}"
        except _FAILURES as failed:
            return f"the server cannot be reached ({type(failed).__name__})"


@functools.cache
def _trust() -> ssl.SSLContext:
    """Once: reading the machine's roots takes tens of milliseconds."""
    return ssl.create_default_context()


def check_url(url: str) -> None:
    """https, or http to this machine: the body holds a token."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        parts, host = urlsplit(""), ""
    if not host or parts.username is not None or parts.scheme not in ("http", "https"):
        raise error("policy_invalid", "The webhook's address is not a plain https URL.")
    if parts.scheme == "http" and not _is_this_machine(host):
        raise error("policy_invalid", "The webhook's address is plain http to another machine; use https.")


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
