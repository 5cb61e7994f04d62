"""How to reach registries: the file `registries.toml`, read from $CLOCHE_REGISTRIES or the node's configuration.

    default_registry = "registry.example"      # what a bare name such as `python` belongs to

    [timeouts]                                 # all optional, in seconds
    connect_s = 10
    silence_s = 30                             # a connection on which nothing comes for so long is given up
    rate_min_bytes_s = 1024                    # so is one that is slower than this, over half a minute
    retries = 4
    retry_after_max_s = 30                     # the longest wait that a registry may ask for

    [registry."registry.example"]              # HOST or HOST:PORT, as in the names of images
    mirrors = ["https://mirror.example/v2-prefix", "http://127.0.0.1:5000"]    # tried in order, then the registry
    ca_file = "/etc/cloche/example-ca.pem"     # trusted for this host beside the system's
    insecure = true                            # may be asked without TLS; loopback always may
    redirects_to = ["blobs.example"]           # hosts on private addresses that it may send us to

A table `[registry."mirror.example"]` also applies to the mirror of that host. Unknown keys are refused.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from cloche.wire.errors import ClocheError, error
from cloche_server.images.reference import DEFAULT_REGISTRY, parse, shown

VARIABLE: Final = "CLOCHE_REGISTRIES"
FILE: Final = "registries.toml"
FILE_BYTES_MAX: Final = 1024 * 1024
MIRRORS_MAX: Final = 16


@dataclass(frozen=True)
class Timeouts:
    """How long, how slow, how often."""

    connect_s: float = 10.0
    silence_s: float = 30.0
    rate_min_bytes_s: float = 1024.0
    rate_window_s: float = 30.0
    retries: int = 4
    """After the first attempt, and again after each that brought something."""
    backoff_s: float = 0.25
    """Before the first repeat; doubled each time."""
    retry_after_max_s: float = 30.0


@dataclass(frozen=True)
class HostSettings:
    """What is particular to one host."""

    mirrors: tuple[str, ...] = ()
    ca_file: Path | None = None
    insecure: bool = False
    redirects_to: tuple[str, ...] = ()


@dataclass(frozen=True)
class RegistrySettings:
    """The whole file."""

    default_registry: str = DEFAULT_REGISTRY
    timeouts: Timeouts = Timeouts()
    hosts: Mapping[str, HostSettings] = field(default_factory=dict)

    def host(self, name: str) -> HostSettings:
        return self.hosts.get(name, _NOTHING)

    def may_be_plain(self, name: str) -> bool:
        """Whether `HOST[:PORT]` may be asked without TLS."""
        return self.host(name).insecure or is_loopback_name(name)


_NOTHING: Final = HostSettings()


def is_loopback_name(name: str) -> bool:
    """`localhost` or an address of loopback; other names are whatever the DNS says today."""
    host = urlsplit(f"//{name}").hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings(config_directory: Path | None = None, environ: Mapping[str, str] | None = None) -> RegistrySettings:
    """From $CLOCHE_REGISTRIES, which must then be there, or from the directory, where it may be missing."""
    environ = os.environ if environ is None else environ
    named = environ.get(VARIABLE, "").strip()
    if named:
        return read_settings(Path(named))
    if config_directory is None or not (config_directory / FILE).exists():
        return RegistrySettings()
    return read_settings(config_directory / FILE)


def read_settings(path: Path) -> RegistrySettings:
    return parse_settings(read_text(path), path)


def read_text(path: Path, bytes_max: int = FILE_BYTES_MAX) -> str:
    """Of a file of the administrator's."""
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as raised:
        raise bad_file(path, None, f"it cannot be read: {raised.strerror}") from None
    if len(data) > bytes_max:
        raise bad_file(path, None, f"it has more than {bytes_max} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise bad_file(path, None, "it is not UTF-8") from None


def parse_settings(text: str, path: Path = Path(FILE)) -> RegistrySettings:
    """`path` is for messages, and what relative names of files start from."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as raised:
        raise bad_file(path, None, str(raised)) from None
    reader = Reader(path, text)
    reader.only(document, {"default_registry", "timeouts", "registry"}, "")
    default = reader.get(document, "default_registry", str, DEFAULT_REGISTRY)
    reader.check_host(default, "default_registry")
    hosts = {}
    for name, table in reader.get(document, "registry", dict, {}).items():
        reader.check_host(name, name)
        hosts[name.lower()] = _host(reader, name, table)
    return RegistrySettings(default.lower(), _timeouts(reader, reader.get(document, "timeouts", dict, {})), hosts)


def _timeouts(reader: Reader, table: dict[str, Any]) -> Timeouts:
    fields = {each.name: each for each in dataclasses.fields(Timeouts)}
    reader.only(table, set(fields), "timeouts.")
    found = {}
    for name in table:
        value = reader.get(table, name, int if name == "retries" else (int, float), 0)
        if not 0 <= value <= 3600 * 24 or (value == 0 and name not in ("retries", "backoff_s", "rate_min_bytes_s")):
            raise reader.bad(name, "is out of range")
        found[name] = value
    return Timeouts(**found)


def _host(reader: Reader, name: str, table: object) -> HostSettings:
    if not isinstance(table, dict):
        raise reader.bad(name, "is not a table")
    reader.only(table, {each.name for each in dataclasses.fields(HostSettings)}, f'registry."{name}".')
    mirrors = reader.strings(table, "mirrors")
    if len(mirrors) > MIRRORS_MAX:
        raise reader.bad("mirrors", f"has more than {MIRRORS_MAX} entries")
    for mirror in mirrors:
        if not _is_base(mirror):
            raise reader.bad(mirror, "is not https://HOST[:PORT][/PATH], or http:// of the same form")
    ca_file = reader.get(table, "ca_file", str, "")
    redirects = reader.strings(table, "redirects_to")
    for host in redirects:
        reader.check_host(host, host)
    return HostSettings(
        tuple(each.rstrip("/") for each in mirrors),
        reader.path.parent / ca_file if ca_file else None,
        reader.get(table, "insecure", bool, False),
        tuple(each.lower() for each in redirects),
    )


def _is_base(url: str) -> bool:
    try:
        parts = urlsplit(url)
        whole = parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        return False
    extra = parts.query or parts.fragment or parts.username is not None or parts.password is not None
    clean = re.fullmatch(r"[\x21-\x7e]{1,1024}", url)
    return parts.scheme in ("http", "https") and bool(whole) and not extra and clean is not None


class Reader:
    """Values of a TOML file by their type. Errors name the file and, as near as can be known, the line."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self._text = text

    def only(self, table: Mapping[str, Any], known: set[str], where: str) -> None:
        for key in table:
            if key not in known:
                raise self.bad(key, f"is not known; {where or 'at the top'} has: {', '.join(sorted(known))}")

    def get(self, table: Mapping[str, Any], key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = table.get(key, default)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.bad(key, f"is not {' or '.join(_WORDS[each] for each in kinds)}")
        return value

    def strings(self, table: Mapping[str, Any], key: str) -> list[str]:
        found = self.get(table, key, list, [])
        if not all(isinstance(each, str) for each in found):
            raise self.bad(key, "is not a list of texts")
        return list(found)

    def one_of(self, table: Mapping[str, Any], key: str, words: tuple[str, ...]) -> Any:
        """One of `words`; the first when nothing is said."""
        found = self.get(table, key, str, words[0])
        if found not in words:
            raise self.bad(key, f"is not one of: {', '.join(words)}")
        return found

    def check_host(self, name: str, key: str) -> None:
        try:
            good = parse(f"{name}/x").registry == name.lower()
        except ClocheError:
            good = False
        if not good:
            raise self.bad(key, "is not HOST or HOST:PORT, as in the names of images")

    def bad(self, key: str, why: str) -> ClocheError:
        return bad_file(self.path, self._line(key), f"'{shown(key, 80)}' {why}")

    def _line(self, key: str) -> int | None:
        return next((number for number, line in enumerate(self._text.splitlines(), 1) if key in line), None)


_WORDS: Final[dict[type, str]] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}


def bad_file(path: Path, line: int | None, why: str) -> ClocheError:
    place = f"{path}, line {line}" if line else str(path)
    return error("invalid_request", f"{place}: {why}.", fix=f"Correct {path}.")
