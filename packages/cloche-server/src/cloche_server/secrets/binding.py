"""What a secret is bound to, and the check of what an operator asks for. Pure; no value is in here."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, Literal, Protocol
from urllib.parse import urlsplit

import msgspec

from cloche.wire.errors import ClocheError, error
from cloche.wire.secrets import Place, SecretView, SetSecret, Source
from cloche_server.policy.names import BadName, normal_host

Kind = Literal["value", "file", "command", "http"]
VALUE_BYTES_MIN: Final = 8
"""A shorter one could not be told from ordinary text where answers are searched for it."""
VALUE_BYTES_MAX: Final = 64 * 1024
ARGUMENT_CHARS_MAX: Final = 8 * 1024
FIELDS: Final[dict[Kind, frozenset[str]]] = {
    "value": frozenset({"value"}),
    "file": frozenset({"path", "ttl_s"}),
    "command": frozenset({"argv", "ttl_s"}),
    "http": frozenset({"url", "field", "headers_from", "method", "body", "ttl_s"}),
}
NEEDED: Final[dict[Kind, str]] = {"value": "value", "file": "path", "command": "argv", "http": "url"}
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")
_PLAIN: Final = re.compile(r"[\x20-\x7e]*")
_PORTED: Final = re.compile(r"(?P<host>.+):(?P<port>[0-9]{1,5})")
_NOT_A_PLACE: Final = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "expect"}
)
"""Headers that say how a message is framed or where it goes: no value stands in them."""


class Asker(Protocol):
    """Who asks, as `api.backend.Caller` has it."""

    @property
    def tenant(self) -> str: ...

    @property
    def owner(self) -> str: ...

    @property
    def is_admin(self) -> bool: ...


class Spot(msgspec.Struct, frozen=True):
    """A `wire.secrets.Place`, as it is stored."""

    kind: Literal["header", "basic", "query", "body"]
    name: str | None = None
    format: str = "{}"

    def place(self) -> Place:
        return Place(kind=self.kind, name=self.name, format=self.format)


class Origin(msgspec.Struct, frozen=True):
    """Where the value comes from; a given one is kept apart from this."""

    kind: Kind
    path: str | None = None
    argv: tuple[str, ...] = ()
    url: str | None = None
    field: str | None = None
    headers_from: dict[str, str] = {}
    method: str = "GET"
    body: str | None = None
    ttl_s: float | None = None


class Binding(msgspec.Struct, frozen=True):
    """All of a secret but its value. Sealed whole: an address or a header of a source may be a secret of its own."""

    tenant: str
    owner: str
    name: str
    origin: Origin
    hosts: tuple[str, ...]
    places: tuple[Spot, ...]
    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None
    require: bool = False
    set_at: float = 0.0

    def __repr__(self) -> str:
        return f"<Binding {self.name} of {self.owner}>"

    def view(self, leases: int) -> SecretView:
        return SecretView(
            name=self.name,
            owner=self.owner,
            source=self.origin.kind,
            hosts=list(self.hosts),
            methods=None if self.methods is None else list(self.methods),
            paths=None if self.paths is None else list(self.paths),
            places=[spot.place() for spot in self.places],
            require=self.require,
            set_at=self.set_at,
            leases=leases,
        )


def bind(asker: Asker, name: str, asked: SetSecret, *, now: float) -> Binding:
    """The binding that is asked for, or `invalid_request`, `forbidden`."""
    _check_source(asked.source)
    if asked.source.kind != "value" and not asker.is_admin:
        raise error(
            "forbidden",
            f"A secret from a {asked.source.kind} is asked for by the node itself, so only its operator can set one.",
            fix="Give the value instead: cloche secret set NAME --from env, or --from file without a node's path.",
        )
    return Binding(
        tenant=asker.tenant,
        owner=asker.owner,
        name=name,
        origin=_origin(asked.source),
        hosts=tuple(dict.fromkeys(_host(each) for each in asked.hosts)),
        places=tuple(_spot(each) for each in asked.places),
        methods=None if asked.methods is None else tuple(asked.methods),
        paths=None if asked.paths is None else tuple(asked.paths),
        require=asked.require,
        set_at=now,
    )


def check_value(data: bytes | memoryview) -> str | None:
    """Why such a value cannot be put into a request; None: it can."""
    if len(data) < VALUE_BYTES_MIN:
        return f"it has fewer than {VALUE_BYTES_MIN} bytes and could not be told from ordinary text"
    if len(data) > VALUE_BYTES_MAX:
        return f"it has more than {VALUE_BYTES_MAX} bytes"
    if any(byte < 0x20 or byte == 0x7F for byte in data):
        return "it has a line break or another control character in it"
    return None


def _check_source(source: Source) -> None:
    given = {name for name in source.model_fields_set if name != "kind" and getattr(source, name) not in (None, {})}
    extra = given - FIELDS[source.kind]
    if extra:
        raise _invalid(f"source: {', '.join(sorted(extra))} does not belong to a {source.kind}")
    if NEEDED[source.kind] not in given:
        raise _invalid(f"source: a {source.kind} needs {NEEDED[source.kind]}")
    if source.path is not None and (not source.path.startswith("/") or "\0" in source.path):
        raise _invalid("source.path is an absolute path on the node")
    if source.argv is not None and not _is_command(source.argv):
        raise _invalid("source.argv is a program and its arguments, without NUL, each of at most 8 KiB")
    if source.url is not None and (why := url_problem(source.url)) is not None:
        raise _invalid(f"source.url {why}")
    for name, value in source.headers_from.items():
        if not _TOKEN.fullmatch(name) or not _PLAIN.fullmatch(value):
            raise _invalid("source.headers_from has a name or a value that is not a header's")


def url_problem(url: str) -> str | None:
    """Why a value is not asked for there; None: it is."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return "is not a URL"
    if not host or parts.username is not None or parts.scheme not in ("http", "https"):
        return "is not a plain http or https URL"
    if parts.scheme == "http" and not _is_this_machine(host):
        return "is plain http to another machine; use https"
    return None


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_command(argv: list[str]) -> bool:
    return bool(argv and argv[0]) and all("\0" not in each and len(each) <= ARGUMENT_CHARS_MAX for each in argv)


def _origin(source: Source) -> Origin:
    return Origin(
        kind=source.kind,
        path=source.path,
        argv=tuple(source.argv or ()),
        url=source.url,
        field=source.field,
        headers_from=dict(source.headers_from),
        method=source.method,
        body=source.body,
        ttl_s=source.ttl_s,
    )


def _host(text: str) -> str:
    """Normal: `name`, `*.suffix` or an address, with `:port` when it was given."""
    ported = _PORTED.fullmatch(text) if text.count(":") == 1 or text.startswith("[") else None
    host, port = (ported["host"], int(ported["port"])) if ported else (text, None)
    if port is not None and not 1 <= port <= 65535:
        raise _invalid(f"hosts: {text[:80]!r} has no port that exists")
    star, name = ("*.", host[2:]) if host.startswith("*.") else ("", host)
    try:
        normal, address = normal_host(name)
    except BadName as bad:
        raise _invalid(f"hosts: {text[:80]!r} is not a host ({bad.reason})") from None
    if star and (address is not None or "." not in normal):
        raise _invalid(f"hosts: {text[:80]!r} is too wide; name a domain: *.example.com")
    shown = f"[{normal}]" if address is not None and address.version == 6 and port is not None else normal
    return f"{star}{shown}" if port is None else f"{star}{shown}:{port}"


def _spot(place: Place) -> Spot:
    name = place.name or ""
    if place.kind == "header" and (not _TOKEN.fullmatch(name) or name.lower() in _NOT_A_PLACE):
        raise _invalid("places: a header needs the name of one that can carry a credential")
    if place.kind == "query" and (not name or not _PLAIN.fullmatch(name)):
        raise _invalid("places: a query needs the parameter's name")
    if place.kind == "basic" and (":" in name or not _PLAIN.fullmatch(name)):
        raise _invalid("places: a user of Basic auth has no colon and no control character")
    if place.format.count("{}") != 1 or not _PLAIN.fullmatch(place.format):
        raise _invalid("places: format has {} in it once, where the value stands")
    return Spot(place.kind, place.name, place.format)


def _invalid(text: str) -> ClocheError:
    return error("invalid_request", f"{text}.")
