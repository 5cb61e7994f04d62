"""A caller's own credentials for a registry: from where docker and podman keep them. Read, never written.

In order: REGISTRY_AUTH_FILE, podman's auth.json, docker's config.json; in each an entry for the registry (or for a path in it), then
a credential helper that the file names. What cannot be read is as if it were not there: the node then asks without.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from cloche.client._target import Target, is_loopback
from cloche.wire.images import Credentials

DEFAULT_REGISTRY: Final = "docker" + ".io"
"""Where a name without a host is from, unless the node says otherwise."""
OLD_NAMES: Final = (f"https://index.{DEFAULT_REGISTRY}/v1/", f"index.{DEFAULT_REGISTRY}")
"""What docker calls that registry in its files."""
FILE_BYTES_MAX: Final = 1024 * 1024
HELPER_S: Final = 20.0
HELPER: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
TOKEN_USER: Final = "<token>"


def registry_of(image: str) -> tuple[str, str]:
    """(host, path) of a name: Docker's rule. A first part with a dot or a port, or `localhost`, is a host."""
    name = image.partition("@")[0]
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return first, rest.rpartition(":")[0] or rest
    path = name.rpartition(":")[0] or name
    return DEFAULT_REGISTRY, path if slash else f"library/{path}"


def may_carry(target: Target) -> bool:
    """Whether a password may be sent to this node: never in the clear over a network."""
    if target.socket is not None or target.url.startswith("https://"):
        return True
    host = re.sub(r"^http://(\[[^]]*\]|[^:/]*).*", r"\1", target.url).strip("[]")
    return is_loopback(host)


def saved_credentials(image: str, environ: Mapping[str, str] | None = None) -> Credentials | None:
    """What this user has for the registry of `image`; None when there is nothing."""
    host, path = registry_of(image)
    for file in _files(os.environ if environ is None else environ):
        document = _read(file)
        found = _from_auths(document, host, path) or _from_helper(document, host)
        if found is not None:
            return found
    return None


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    if environ.get("REGISTRY_AUTH_FILE"):
        yield Path(environ["REGISTRY_AUTH_FILE"])
    if environ.get("XDG_RUNTIME_DIR"):
        yield Path(environ["XDG_RUNTIME_DIR"], "containers", "auth.json")
    yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config", "containers", "auth.json")
    yield Path(environ.get("DOCKER_CONFIG") or home / ".docker", "config.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(FILE_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _from_auths(document: dict[str, Any], host: str, path: str) -> Credentials | None:
    auths = document.get("auths")
    if not isinstance(auths, dict):
        return None
    for key in _keys(host, path):
        entry = auths.get(key)
        if isinstance(entry, dict) and isinstance(entry.get("auth"), str):
            return _decoded(entry["auth"])
    return None


def _keys(host: str, path: str) -> Iterator[str]:
    """The most exact first: host/team/app, host/team, host; then what docker calls it."""
    parts = path.split("/")
    for count in range(len(parts), 0, -1):
        yield "/".join([host, *parts[:count]])
    yield from (host, f"https://{host}", f"https://{host}/", f"https://{host}/v1/", f"https://{host}/v2/")
    if host == DEFAULT_REGISTRY:
        yield from OLD_NAMES


def _decoded(text: str) -> Credentials | None:
    try:
        name, colon, password = base64.b64decode(text, validate=True).decode().rstrip("\0").partition(":")
    except (binascii.Error, ValueError):
        return None
    return _credentials(name, password) if colon else None


def _from_helper(document: dict[str, Any], host: str) -> Credentials | None:
    helpers = document.get("credHelpers")
    helper = helpers.get(host) if isinstance(helpers, dict) else None
    helper = helper or document.get("credsStore")
    if not isinstance(helper, str) or not HELPER.fullmatch(helper):
        return None
    program = shutil.which(f"docker-credential-{helper}")
    if program is None:
        return None
    server = OLD_NAMES[0] if host == DEFAULT_REGISTRY else host
    try:
        done = subprocess.run(
            [program, "get"], input=server.encode(), capture_output=True, timeout=HELPER_S, check=False
        )
        said = json.loads(done.stdout[:FILE_BYTES_MAX]) if done.returncode == 0 else {}
        name, password = said.get("Username"), said.get("Secret")
    except (OSError, subprocess.TimeoutExpired, ValueError, AttributeError, RecursionError):
        return None
    return _credentials(name, password) if isinstance(name, str) and isinstance(password, str) else None


def _credentials(name: str, password: str) -> Credentials | None:
    """An identity token instead of a password is the node's business only where it has its own."""
    if not name or not password or name == TOKEN_USER:
        return None
    try:
        return Credentials(username=name, password=password)
    except ValueError:
        return None
