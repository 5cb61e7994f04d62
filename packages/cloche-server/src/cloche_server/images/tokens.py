"""What a registry's 401 asks for: a basic login, or a token from the server that it names.

The login goes to the registry and to the token server that the registry itself named over a connection as safe as its own:
https, or plain http only where the registry itself may be asked so. A token is for pulling one repository and is kept for
as long as it is good.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlencode

from cloche.wire.errors import ClocheError, error
from cloche_server.images.auth import Credentials, Login
from cloche_server.images.outbound import Failed, Outbound, origin_of
from cloche_server.images.reference import shown

CHALLENGE_CHARS_MAX: Final = 8 * 1024
CHALLENGES_MAX: Final = 8
TOKEN_BYTES_MAX: Final = 256 * 1024
TOKEN_SECONDS: Final = (10.0, 60.0, 3600.0)
"""Kept for at least, without a word of the server, and at most so long."""
_TOKEN: Final = re.compile(r"[\x21-\x7e]{1,65536}")
_WORD: Final = re.compile(r"[\s,]*([!#$%&'*+.^_`|~0-9A-Za-z-]+)")
_VALUE: Final = re.compile(r"\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^\s,\"]+))")


@dataclass(frozen=True)
class Challenge:
    """One way to be let in."""

    scheme: str
    parameters: dict[str, str]


@dataclass(frozen=True)
class Asker:
    """Which registry or mirror, and which repository of it."""

    base: str
    host: str
    repository: str
    is_mirror: bool


@dataclass(frozen=True)
class _Kept:
    header: str = field(repr=False)
    until: float


class Tokens:
    """Authorization headers by registry and repository."""

    def __init__(self, outbound: Outbound, credentials: Credentials) -> None:
        self._outbound = outbound
        self._credentials = credentials
        self._kept: dict[Asker, _Kept] = {}
        self._lock = asyncio.Lock()

    def header(self, asker: Asker) -> str | None:
        kept = self._kept.get(asker)
        return kept.header if kept is not None and kept.until > time.monotonic() else None

    async def obtain(self, asker: Asker, said: Sequence[str], refused: str | None) -> None:
        """A header in answer to `said`. `refused` is the one that was sent: somebody else may have a newer one."""
        async with self._lock:
            if self.header(asker) not in (None, refused):
                return
            self._kept.pop(asker, None)
            challenges = {each.scheme: each for each in reversed(parse_challenges(said))}
            login = await self._credentials.find(asker.host, asker.repository, is_mirror=asker.is_mirror)
            if "bearer" in challenges:
                self._kept[asker] = await self._token(asker, challenges["bearer"], login)
            elif "basic" in challenges and login is not None and login.identity_token is None:
                self._kept[asker] = _Kept(login.basic, time.monotonic() + TOKEN_SECONDS[2])
            else:
                raise denied(asker.host, asker.repository, has_login=login is not None)
            if self.header(asker) == refused:
                raise denied(asker.host, asker.repository, has_login=login is not None)

    async def _token(self, asker: Asker, challenge: Challenge, login: Login | None) -> _Kept:
        realm = challenge.parameters.get("realm", "")
        first, origin = origin_of(asker.base), origin_of(realm)
        if origin.scheme == "http" and first.scheme != "http":
            raise Failed(f"its token server {shown(str(origin))} is not asked over TLS", again=False)
        query = {"service": challenge.parameters.get("service", ""), "scope": f"repository:{asker.repository}:pull"}
        headers, content, method = {"accept": "application/json"}, b"", "GET"
        if login is not None and login.identity_token is not None:
            method = "POST"
            form = {"grant_type": "refresh_token", "client_id": "cloche", "refresh_token": login.identity_token}
            content = urlencode({**query, **form}).encode()
            headers["content-type"] = "application/x-www-form-urlencoded"
        else:
            if login is not None:
                headers["authorization"] = login.basic
                query["account"] = login.username
            filled = {name: value for name, value in query.items() if value}
            realm += ("&" if "?" in realm else "?") + urlencode(filled)
        async with self._outbound.request(
            method, realm, first=first, headers=headers, content=content, follow=False
        ) as answer:
            if answer.status in (400, 401, 403, 404):
                raise denied(asker.host, asker.repository, has_login=login is not None)
            if answer.status != 200:
                raise Failed(f"its token server answered {answer.status}", again=answer.status >= 500)
            return _parse_token(await answer.body(TOKEN_BYTES_MAX))


def denied(host: str, repository: str, *, has_login: bool | None) -> ClocheError:
    """Registries answer the same for what is private and for what does not exist."""
    why = {True: "this login may not read it", False: "it asks for a login", None: "it may not be read"}[has_login]
    return error(
        "registry_denied", f"{shown(host)} does not give {shown(repository)}: {why}, or there is no such thing."
    )


def parse_challenges(said: Sequence[str]) -> list[Challenge]:
    """The values of WWW-Authenticate headers; several challenges may share one."""
    found: list[Challenge] = []
    for text in said[:CHALLENGES_MAX]:
        position = 0
        while match := _WORD.match(text[:CHALLENGE_CHARS_MAX], position):
            position = match.end()
            value = _VALUE.match(text[:CHALLENGE_CHARS_MAX], position)
            if value is None:
                found.append(Challenge(match[1].lower(), {}))
            elif found:
                position = value.end()
                plain = value[2] if value[1] is None else re.sub(r"\\(.)", r"\1", value[1])
                found[-1].parameters.setdefault(match[1].lower(), plain)
            else:
                break  # a parameter of nothing
    return found


def _parse_token(body: bytes) -> _Kept:
    try:
        document: Any = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    found = document if isinstance(document, dict) else {}
    token = found.get("token") or found.get("access_token")
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise Failed("its token server answered something that is not a token", again=False)
    least, usual, most = TOKEN_SECONDS
    seconds = found.get("expires_in")
    good = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    kept = min(max(least, seconds), most) if good and seconds else usual
    return _Kept(f"Bearer {token}", time.monotonic() + kept * 0.9)
