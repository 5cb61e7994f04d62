"""A secret as the gate gives it: its value, its placeholder, and for which requests it may be used. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal

PlaceKind = Literal["header", "basic", "query", "body"]
_MARK: Final = "{}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the value may stand. `name`: of the header, the parameter, or Basic's user; None: any."""

    kind: PlaceKind
    name: str | None = None
    format: str = _MARK

    def written(self, text: bytes) -> bytes:
        """The whole of the place with `text` in it."""
        return self.format.encode().replace(_MARK.encode(), text)


@dataclass(frozen=True, slots=True)
class Target:
    """What a connection was opened for."""

    host: str
    port: int
    tls: bool


@dataclass(frozen=True, slots=True)
class Secret:
    """One binding that a sandbox holds."""

    name: str
    placeholder: bytes
    value: bytes = field(repr=False)
    hosts: tuple[str, ...]
    methods: frozenset[str] | None
    paths: tuple[str, ...] | None
    places: tuple[Place, ...]
    require: bool = False

    def bound_to(self, target: Target) -> bool:
        """Whether its value may go to that host. Without TLS only when the binding names that very port."""
        for pattern in self.hosts:
            host, port = split_port(pattern)
            if matches_host(host, target.host) and (port == target.port or (port is None and target.tls)):
                return True
        return False

    def fits(self, method: str, path: str) -> bool:
        """Whether its value may go with a request like this, to a host that it is bound to."""
        return (self.methods is None or method in self.methods) and (
            self.paths is None
            or (is_plain(path) and any(path_pattern(pattern).fullmatch(path) for pattern in self.paths))
        )

    def places_of(self, kind: PlaceKind) -> tuple[Place, ...]:
        return tuple(place for place in self.places if place.kind == kind)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """What is known of one sandbox; replaced as a whole."""

    id: str
    lineage: str
    secrets: tuple[Secret, ...] = ()
    ended: tuple[Secret, ...] = ()
    """Held before and not now: no more given out, still kept out of answers."""


def secret_of(fields: Mapping[str, Any]) -> Secret:
    """From a control message."""
    methods, paths = fields.get("methods"), fields.get("paths")
    return Secret(
        name=str(fields["name"]),
        placeholder=str(fields["placeholder"]).encode(),
        value=base64.b64decode(fields["value"], validate=True),
        hosts=tuple(str(host).lower() for host in fields["hosts"]),
        methods=None if methods is None else frozenset(methods),
        paths=None if paths is None else tuple(paths),
        places=tuple(
            Place(kind=place["kind"], name=place.get("name"), format=place.get("format") or _MARK)
            for place in fields["places"]
        ),
        require=bool(fields.get("require", False)),
    )


def sandbox_of(fields: Mapping[str, Any], before: Sandbox | None) -> Sandbox:
    """From a control message; what `before` held is still kept out of answers."""
    secrets = tuple(secret_of(one) for one in fields["secrets"])
    values = {secret.value for secret in secrets}
    past: Iterable[Secret] = () if before is None else (*before.secrets, *before.ended)
    ended = {secret.value: secret for secret in past if secret.value not in values}
    return Sandbox(
        id=str(fields["id"]),
        lineage=str(fields["lineage"]),
        secrets=secrets,
        ended=tuple(ended.values())[:_ENDED_MAX],
    )


_ENDED_MAX: Final = 32


def split_port(pattern: str) -> tuple[str, int | None]:
    """`api.test:8443` → its host and port; brackets of an IPv6 address are taken away."""
    found = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?|([^:]*)(?::(\d+))?", pattern)
    if found is None:
        return pattern, None
    port = found[2] or found[4]
    return found[1] or found[3], int(port) if port else None


def matches_host(pattern: str, host: str) -> bool:
    """`*.test` is every name below it and not `test` itself."""
    if pattern.startswith("*."):
        return host.endswith(pattern[1:]) and len(host) > len(pattern) - 1
    return pattern == host


_SEGMENTS: Final = re.compile(r"/|(?:/[!-~]+)+/?")
_ESCAPE: Final = re.compile(r"%(.{0,2})")
_HEX: Final = re.compile(r"[0-9a-fA-F]{2}")
_MEANING_ONLY_ESCAPED: Final = re.compile(r"[A-Za-z0-9._~/\\%?#;\x00-\x1f\x7f-]")


def is_plain(path: str) -> bool:
    """Whether every server reads the path alike: no empty segment, no `;`, no escape of what may stand as it is."""
    if not _SEGMENTS.fullmatch(path) or "//" in path or not {"\\", "?", "#", ";"}.isdisjoint(path):
        return False
    digits = [found[1] for found in _ESCAPE.finditer(path)]
    return all(_HEX.fullmatch(each) and not _MEANING_ONLY_ESCAPED.fullmatch(chr(int(each, 16))) for each in digits)


@lru_cache(maxsize=4096)
def path_pattern(pattern: str) -> re.Pattern[str]:
    """`*` is anything within one segment, `**` anything. Escapes are not decoded: what does not match is not let in."""
    parts = re.split(r"(\*\*|\*)", pattern)
    meaning = {"**": ".*", "*": "[^/]*"}
    return re.compile("".join(meaning.get(part, re.escape(part)) for part in parts), re.DOTALL)
