"""Names of hosts in one normal form. What has no such form is refused, never guessed.

A name is lower case, ASCII (IDNA: UTS 46, then A-labels), without its last dot. An address is a dotted quad or IPv6 in
its usual form; what C libraries also take for an address (`2852039166`, `0xa9fea9fe`, `0251.0376.0.1`, `127.1`) is
refused. So two texts mean one host exactly when their normal forms are equal, and a rule compares nothing else.
"""

from __future__ import annotations

import functools
import re
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Final

import idna

from cloche_server.policy.model import Address, Target

NAME_CHARS_MAX: Final = 253
LABEL_CHARS_MAX: Final = 63
TEXT_CHARS_MAX: Final = NAME_CHARS_MAX + 2
"""Before anything is looked at: a last dot, or brackets."""
PORT_MAX: Final = 65535
KEPT_MAX: Final = 512

_ORDINARY: Final = re.compile(r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""A last label of this form makes the whole an address for inet_aton and browsers."""
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}")

REASONS: Final = {
    "empty": "a part of it is empty",
    "too_long": f"it has more than {NAME_CHARS_MAX} characters",
    "label_too_long": f"a part of it has more than {LABEL_CHARS_MAX} characters",
    "bad_character": "it has a character that no name of a host has",
    "userinfo": "it has a user before an @",
    "idn": "it is no valid international name",
    "numeric": "it is a number, but no address in its usual form",
    "zone": "it names a network interface (%)",
    "port": f"its port is not between 1 and {PORT_MAX}",
}


class BadName(ValueError):
    """A text that is no host: `reason` is one of REASONS. The text itself is not in the message: it is hostile."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"This is no name of a host: {REASONS[reason]}.")
        self.reason = reason


def normal_host(text: str) -> tuple[str, Address | None]:
    """The one form of a host, and its address if it is one."""
    if len(text) <= NAME_CHARS_MAX and _ORDINARY.fullmatch(text) and "xn--" not in text:
        return text, None
    return _normal(text)


@functools.lru_cache(maxsize=KEPT_MAX)
def _normal(text: str) -> tuple[str, Address | None]:
    """What is not plainly in its normal form; kept, because addresses come again with every request of a connection."""
    if not text:
        raise BadName("empty")
    if len(text) > TEXT_CHARS_MAX:
        raise BadName("too_long")
    if text.startswith("["):
        if not text.endswith("]"):
            raise BadName("bad_character")
        return _version_6(text[1:-1])
    if ":" in text and "@" not in text:
        return _version_6(text)
    return _name(text if text.isascii() else _ascii(text))


def target(host: str, port: int | str) -> Target:
    """Where somebody wants to go; a port in digits is taken too."""
    number = _port(port)
    name, address = normal_host(host)
    return Target(name, number, address)


def same_host(first: str, second: str) -> bool:
    """Whether two texts, which may be hostile, name one host."""
    try:
        return normal_host(first) == normal_host(second)
    except BadName:
        return False


def host_and_port(text: str, default_port: int | None = None) -> tuple[str, int]:
    """`HOST:PORT` or `[V6]:PORT`, apart and not normal yet; without a port the default, if there is one."""
    if "@" in text:
        raise BadName("userinfo")
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text, ""
    elif ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise BadName("bad_character")
    if not host:
        raise BadName("empty")
    if colon and host != text:
        return host, _port(port)
    if default_port is None:
        raise BadName("port")
    return host, default_port


def _port(port: int | str) -> int:
    if isinstance(port, str):
        port = int(port) if _PORT.fullmatch(port) else 0
    if not 1 <= port <= PORT_MAX:
        raise BadName("port")
    return port


def _version_6(text: str) -> tuple[str, Address]:
    if "%" in text:
        raise BadName("zone")
    try:
        address = IPv6Address(text)
    except AddressValueError:
        raise BadName("bad_character") from None
    return str(address), address


def _ascii(text: str) -> str:
    """By UTS 46; what comes out is judged like any other text."""
    try:
        mapped = idna.uts46_remap(text, std3_rules=False, transitional=False)
        labels = mapped.split(".")
        if max(map(len, labels)) > LABEL_CHARS_MAX:
            raise BadName("label_too_long")  # and IDNA takes long over long ones
        return ".".join(label if label.isascii() else idna.alabel(label).decode() for label in labels)
    except (idna.IDNAError, UnicodeError, IndexError):
        raise BadName("idn") from None


def _name(text: str) -> tuple[str, Address | None]:
    if "@" in text:
        raise BadName("userinfo")
    name = text.lower().removesuffix(".")
    if len(name) > NAME_CHARS_MAX:
        raise BadName("too_long")
    labels = name.split(".")
    for label in labels:
        _check_label(label)
    if _NUMBER.fullmatch(labels[-1]):
        return _version_4(name)
    return name, None


def _version_4(name: str) -> tuple[str, Address]:
    """Four decimal numbers without leading zeros, and nothing else."""
    try:
        return name, IPv4Address(name)
    except AddressValueError:
        raise BadName("numeric") from None


def _check_label(label: str) -> None:
    if not label:
        raise BadName("empty")
    if len(label) > LABEL_CHARS_MAX:
        raise BadName("label_too_long")
    if not _LABEL.fullmatch(label):
        raise BadName("bad_character")
    if label.startswith("xn--") and not _is_punycode(label[4:]):
        raise BadName("idn")


def _is_punycode(text: str) -> bool:
    """Of something that is not plain ASCII, written in its one way: `xn--allowed-` must not stand for `allowed`."""
    try:
        decoded = text.encode("ascii").decode("punycode")
        return not decoded.isascii() and decoded.isprintable() and decoded.encode("punycode").decode() == text
    except (UnicodeError, ValueError, OverflowError):
        return False
