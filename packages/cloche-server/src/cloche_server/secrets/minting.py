"""Values by an HTTP call: the one file of this room that opens a socket.

To an address that the node's operator named, and nowhere else: redirects are not followed, no proxy of the environment is
used, certificates are checked. Plain http only to this machine. What the server says is dropped when it is not the value.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import ssl
from contextlib import aclosing
from typing import Any, Final

import httpx2
import msgspec

from cloche_server.secrets.binding import VALUE_BYTES_MAX, Binding
from cloche_server.secrets.box import unavailable
from cloche_server.secrets.hidden import Hidden
from cloche_server.secrets.sources import checked

HTTP_S_MAX: Final = 5.0
ANSWER_BYTES_MAX: Final = VALUE_BYTES_MAX + 64 * 1024
DEPTH_MAX: Final = 16
_VARIABLE: Final = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_FAILURES: Final = (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, ValueError)


async def from_http(binding: Binding, *, time_s_max: float = HTTP_S_MAX) -> Hidden:
    headers = _headers(binding)
    try:
        async with asyncio.timeout(time_s_max):
            body = await _ask(binding, headers, time_s_max)
    except TimeoutError:
        raise unavailable(binding.name, f"its server did not answer within {time_s_max:g} s") from None
    except _FAILURES as failed:
        raise unavailable(binding.name, f"its server cannot be asked ({type(failed).__name__})") from None
    return _picked(binding, body)


async def _ask(binding: Binding, headers: dict[str, str], time_s_max: float) -> bytearray:
    """By the bare transport: a client would log the address, which may hold a key."""
    origin = binding.origin
    times = dict.fromkeys(("connect", "read", "write", "pool"), time_s_max)
    content = None if origin.body is None else origin.body.encode()
    request = httpx2.Request(
        origin.method, origin.url or "", headers=headers, content=content, extensions={"timeout": times}
    )
    trust = await asyncio.to_thread(_trust)
    async with httpx2.AsyncHTTPTransport(verify=trust, trust_env=False) as transport:
        answer = await transport.handle_async_request(request)
        async with aclosing(answer):
            if answer.status_code != 200:
                raise unavailable(binding.name, f"its server answered {answer.status_code}")
            return await _body(binding, answer)


async def _body(binding: Binding, answer: httpx2.Response) -> bytearray:
    assert isinstance(answer.stream, httpx2.AsyncByteStream)
    body = bytearray()
    async for part in answer.stream:
        body += part
        if len(body) > ANSWER_BYTES_MAX:
            raise unavailable(binding.name, f"its server sent more than {ANSWER_BYTES_MAX} bytes")
    return body


@functools.cache
def _trust() -> ssl.SSLContext:
    """Once: reading the machine's roots takes tens of milliseconds."""
    return ssl.create_default_context()


def _headers(binding: Binding) -> dict[str, str]:
    found = {"accept": "application/json", "user-agent": "cloche"}
    for name, text in binding.origin.headers_from.items():
        variable = _VARIABLE.fullmatch(text)
        if variable is None:
            found[name] = text
        elif variable[1] in os.environ:
            found[name] = os.environ[variable[1]]
        else:
            raise unavailable(binding.name, f"the node's environment has no {variable[1]}, which its request needs")
    return found


def _picked(binding: Binding, body: bytearray) -> Hidden:
    if binding.origin.field is None:
        return checked(binding, body)
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        raise unavailable(binding.name, "its server's answer is not JSON") from None
    finally:
        body[:] = bytes(len(body))
    for part in binding.origin.field.split(".", DEPTH_MAX):
        found = found.get(part) if isinstance(found, dict) else None
    if not isinstance(found, str):
        raise unavailable(binding.name, f"its server's answer has no text at {binding.origin.field}")
    return checked(binding, bytearray(found.encode()))
