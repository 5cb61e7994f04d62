"""Who is asked: `CLOCHE_URL`, then the machine's socket, then the user's own node.

A machine's socket that is there and refuses is an error, never a reason to ask somebody else: the machine's owner
decided who may use it.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from cloche.wire.errors import error

MACHINE_SOCKET: Final = Path("/run/cloche/api.sock")
Chosen = Literal["url", "machine", "user"]


@dataclass(frozen=True)
class Target:
    """Where the API is. `socket` for a unix socket; else `url` is its base."""

    chosen: Chosen
    url: str
    socket: str | None = None
    api_key: str | None = None

    def __str__(self) -> str:
        return f"unix://{self.socket}" if self.socket else self.url

    def __repr__(self) -> str:
        return f"<Target {self} ({self.chosen})>"  # never the key


def user_socket_path(environ: Mapping[str, str] | None = None) -> Path:
    """Where a user's own node listens: below XDG_RUNTIME_DIR, or else below the state directory."""
    return _user_sockets(os.environ if environ is None else environ)[0]


def user_state_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where a user's own node keeps its state."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_STATE_HOME")
    if base and os.path.isabs(base):
        return Path(base, "cloche")
    return Path(environ.get("HOME") or os.path.expanduser("~"), ".local", "state", "cloche")


def choose_target(environ: Mapping[str, str] | None = None, *, machine_socket: Path = MACHINE_SOCKET) -> Target:
    environ = os.environ if environ is None else environ
    url = environ.get("CLOCHE_URL", "").strip()
    key = environ.get("CLOCHE_API_KEY", "").strip() or None
    if url:
        return parse_url(url, key)
    if _is_there(machine_socket):
        return _unix("machine", machine_socket)
    sockets = _user_sockets(environ)
    for path in sockets:
        if _is_there(path):
            _check_own(path)
            return _unix("user", path)
    return _unix("user", sockets[0])


def parse_url(url: str, key: str | None) -> Target:
    """`unix:///path`, `http://` on loopback only when a key is sent, `https://`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise error("invalid_request", "CLOCHE_URL is not a URL.", fix=_URL_FIX) from None
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return Target("url", "http://cloche", parts.path, key)
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username:
        raise error(
            "invalid_request", "CLOCHE_URL must be unix:///PATH, https://HOST or http://localhost:PORT.", fix=_URL_FIX
        )
    if parts.scheme == "http" and key is not None and not is_loopback(host):
        raise error(
            "tls_required", f"The key would cross the network to {host} unencrypted.", fix="Use https:// in CLOCHE_URL."
        )
    name = f"[{host}]" if ":" in host else host
    base = f"{parts.scheme}://{name}" + (f":{port}" if port else "") + parts.path.rstrip("/")
    return Target("url", base, None, key)


_URL_FIX: Final = "Set CLOCHE_URL to the node's address, or unset it to use this machine's."


def _user_sockets(environ: Mapping[str, str]) -> list[Path]:
    sockets = []
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isabs(runtime):
        sockets.append(Path(runtime, "cloche", "api.sock"))
    sockets.append(user_state_dir(environ) / "run" / "api.sock")
    return sockets


def _unix(chosen: Chosen, path: Path) -> Target:
    return Target(chosen, "http://cloche", str(path))


def _is_there(path: Path) -> bool:
    """Also when it may not be looked at: that is a refusal, to be met when connecting."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _check_own(path: Path) -> None:
    try:
        status = path.lstat()
    except OSError:
        return  # connecting will say why
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
        raise error("node_refused", f"{path} is not a socket of your own.", fix="Remove it, or set CLOCHE_URL.")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
