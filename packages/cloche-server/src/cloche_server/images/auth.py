"""Who we are to a registry: what the caller gave, or what `podman login` and `docker login` left.

Files, the first that knows the registry wins: $REGISTRY_AUTH_FILE (then no other), $XDG_RUNTIME_DIR/containers/auth.json,
$XDG_CONFIG_HOME or ~/.config/containers/auth.json, $DOCKER_CONFIG or ~/.docker/config.json. Within a file: its helper for
the registry, its store (`docker-credential-NAME get`), its own entries. A file that cannot be understood is an error that
names it: going on without would ask the registry as a stranger and blame the registry.

A password is in no repr, no message and no log.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cloche.wire.errors import ClocheError, error
from cloche_server.images.reference import DEFAULT_REGISTRY, shown

FILE_BYTES_MAX: Final = 1024 * 1024
SECRET_CHARS_MAX: Final = 64 * 1024
HELPER_SECONDS: Final = 30.0
HELPER_BYTES_MAX: Final = 128 * 1024
END_SECONDS: Final = 2.0
OLD_DEFAULT_SERVER: Final = f"https://index.{DEFAULT_REGISTRY}/v1/"
"""What `docker login` without a name writes, and what helpers are asked for."""
_DEFAULT_HOSTS: Final = (DEFAULT_REGISTRY, f"index.{DEFAULT_REGISTRY}", f"registry-1.{DEFAULT_REGISTRY}")
_HELPER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NO_CREDENTIALS: Final = "credentials not found"
_TOKEN_USER: Final = "<token>"  # the helpers' protocol: the secret is then an identity token


@dataclass(frozen=True)
class Login:
    """A user and a password, or an identity token to be exchanged for others."""

    username: str
    password: str = field(repr=False, default="")
    identity_token: str | None = field(repr=False, default=None)

    @property
    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


class Credentials:
    """Logins by registry. `given` is the caller's own: for the image's registry, never for a mirror."""

    def __init__(
        self,
        given: Login | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        use_files: bool = True,
        helper_seconds: float = HELPER_SECONDS,
    ) -> None:
        self._given = given
        self._environ = dict(os.environ if environ is None else environ)
        self._use_files = use_files
        self._helper_seconds = helper_seconds

    @classmethod
    def nobody(cls) -> Credentials:
        """A stranger: no file is looked at."""
        return cls(use_files=False)

    @property
    def are_given(self) -> bool:
        """Whether what is pulled with them belongs to their owner alone."""
        return self._given is not None

    async def find(self, registry: str, repository: str = "", *, is_mirror: bool = False) -> Login | None:
        """For `HOST[:PORT]`, and for the narrowest part of the repository that a file has an entry for."""
        if self._given is not None and not is_mirror:
            return self._given
        if not self._use_files:
            return None
        for path, must_exist in self._files():
            document = await asyncio.to_thread(_read, path, must_exist)
            login = None if document is None else await self._from_file(path, document, registry, repository)
            if login is not None:
                return login
        return None

    def __repr__(self) -> str:
        return f"<Credentials {'given' if self._given else 'from files' if self._use_files else 'none'}>"

    def _files(self) -> list[tuple[Path, bool]]:
        environ = self._environ
        if named := environ.get("REGISTRY_AUTH_FILE"):
            return [(Path(named), True)]
        home = Path(environ.get("HOME") or os.path.expanduser("~"))
        files = []
        if runtime := environ.get("XDG_RUNTIME_DIR"):
            files.append(Path(runtime, "containers", "auth.json"))
        files.append(Path(environ.get("XDG_CONFIG_HOME") or home / ".config", "containers", "auth.json"))
        files.append(Path(environ.get("DOCKER_CONFIG") or home / ".docker", "config.json"))
        return [(path, False) for path in files]

    async def _from_file(self, path: Path, document: dict[str, Any], registry: str, repository: str) -> Login | None:
        hosts = _DEFAULT_HOSTS if registry in _DEFAULT_HOSTS else (registry,)
        server = OLD_DEFAULT_SERVER if registry in _DEFAULT_HOSTS else registry
        helpers = _table(path, document, "credHelpers")
        named = [helpers[host] for host in (*hosts, server) if host in helpers]
        store = document.get("credsStore")
        for helper in (*named, *([store] if store else [])):
            if not isinstance(helper, str) or not _HELPER_NAME.fullmatch(helper):
                raise _bad(path, "it names a credential helper by something that is not a name")
            login = await self._ask_helper(path, helper, server)
            if login is not None:
                return login
        entries = _table(path, document, "auths")
        return next((found for key in _keys(entries, hosts, repository) if (found := _entry(path, entries[key]))), None)

    async def _ask_helper(self, path: Path, helper: str, server: str) -> Login | None:
        name = f"docker-credential-{helper}"
        program = shutil.which(name, path=self._environ.get("PATH"))
        if program is None:
            raise _bad(path, f"it names the credential helper {name}, which is not in PATH")
        code, output = await self._run(path, name, program, server)
        if code != 0:
            if _NO_CREDENTIALS in output[:1024].decode(errors="replace").lower():
                return None
            raise _bad(path, f"its credential helper {name} failed with status {code}")
        try:
            answer = json.loads(output)
            user, secret = answer["Username"], answer["Secret"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _bad(path, f"its credential helper {name} answered something else than a login") from None
        if not _is_secret(user) or not _is_secret(secret):
            raise _bad(path, f"its credential helper {name} answered something else than a login")
        return Login("", "", secret) if user == _TOKEN_USER else Login(user, secret)

    async def _run(self, path: Path, name: str, program: str, server: str) -> tuple[int, bytes]:
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                "get",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=self._environ,
                start_new_session=True,
            )
        except OSError as raised:
            raise _bad(path, f"its credential helper {name} cannot be started: {raised.strerror}") from None
        try:
            async with asyncio.timeout(self._helper_seconds):
                return await _talk(process, server.encode() + b"\n")
        except TimeoutError:
            raise _bad(path, f"its credential helper {name} did not answer in {self._helper_seconds:g} s") from None
        except ValueError:
            raise _bad(path, f"its credential helper {name} answered more than {HELPER_BYTES_MAX} bytes") from None
        finally:
            await _end(process)


async def _talk(process: asyncio.subprocess.Process, question: bytes) -> tuple[int, bytes]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(question)
        await process.stdin.drain()
        process.stdin.close()
    except (BrokenPipeError, ConnectionResetError):
        pass  # a helper that did not read may still have answered
    output = bytearray()
    while part := await process.stdout.read(16 * 1024):
        output += part
        if len(output) > HELPER_BYTES_MAX:
            raise ValueError("too long")
    return await process.wait(), bytes(output)


async def _end(process: asyncio.subprocess.Process) -> None:
    """With what it started, if it has not ended by itself: a helper that hangs often waits for a child of its own."""
    if process.returncode is not None:
        return
    os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(END_SECONDS):
            while await process.stdout.read(HELPER_BYTES_MAX):
                pass  # asyncio sees the end of a process only behind the end of its output
            await process.wait()
    except TimeoutError:
        return  # a child in a session of its own holds the pipe; the helper itself is gone and reaped


def _read(path: Path, must_exist: bool) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise _bad(path, "REGISTRY_AUTH_FILE names it and it is not there") from None
        return None
    except OSError as raised:
        raise _bad(path, f"it cannot be read: {raised.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise _bad(path, f"it has more than {FILE_BYTES_MAX} bytes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise _bad(path, "it is not JSON") from None
    if not isinstance(document, dict):
        raise _bad(path, "it is not a table")
    return document


def _table(path: Path, document: dict[str, Any], name: str) -> dict[str, Any]:
    found = document.get(name)
    found = {} if found is None else found
    if not isinstance(found, dict):
        raise _bad(path, f"its {name} is not a table")
    return found


def _keys(entries: dict[str, Any], hosts: tuple[str, ...], repository: str) -> list[str]:
    """Narrowest first: `host/team/app`, `host/team`, `host`; then `https://host/…`, as old versions wrote."""
    parts = repository.split("/") if repository else []
    wanted = [
        "/".join((host, *parts[:count])) for count in range(len(parts), -1, -1) for host in hosts
    ]  # fmt: skip
    keys = [key for key in wanted if key in entries]
    with_scheme = re.compile(r"https?://([^/]+)(?:/.*)?", re.DOTALL)
    return keys + [key for key in entries if (match := with_scheme.fullmatch(key)) and match[1] in hosts]


def _entry(path: Path, entry: object) -> Login | None:
    if not isinstance(entry, dict):
        raise _bad(path, "an entry of it is not a table")
    token = entry.get("identitytoken")
    username, password = entry.get("username") or "", entry.get("password") or ""
    if entry.get("auth"):
        username, password = _decoded(path, entry["auth"])
    if not all(_is_secret(each) for each in (username, password, token or "")):
        raise _bad(path, "an entry of it is not a login")
    if token:
        return Login(username, "", token)
    return Login(username, password) if username and password else None


def _decoded(path: Path, auth: object) -> tuple[str, str]:
    try:
        if not isinstance(auth, str):
            raise ValueError("not a text")
        text = base64.b64decode(auth, validate=True).decode()
    except (binascii.Error, ValueError):
        raise _bad(path, "the auth of an entry is not base64 of USER:PASSWORD") from None
    username, colon, password = text.partition(":")
    if not colon:
        raise _bad(path, "the auth of an entry is not base64 of USER:PASSWORD")
    return username, password.rstrip("\0")


def _is_secret(value: object) -> bool:
    """Text of a length that somebody could mean."""
    return isinstance(value, str) and len(value) <= SECRET_CHARS_MAX


def _bad(path: Path, why: str) -> ClocheError:
    return error(
        "registry_denied", f"The credentials in {shown(str(path))} cannot be used: {why}.", fix=f"Correct {path}."
    )
