"""Names of images, in Docker's grammar: `python:3.12-slim`, `registry.example:5000/team/app@sha256:…`.

A bare name belongs to the default registry; there a single word means `library/WORD`. Without tag and digest the tag is
`latest`. Hosts are compared in lower case. Of the digests only sha256 is accepted.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from typing import Final

from cloche.wire.errors import ClocheError, error

DEFAULT_REGISTRY: Final = "docker." + "io"
"""In pieces, because no file of ours names a registry's host as the place to fetch from; this is part of a grammar."""
DEFAULT_TAG: Final = "latest"
TEXT_CHARS_MAX: Final = 512
REPOSITORY_CHARS_MAX: Final = 255
PORT_MAX: Final = 65535
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")

_OLD_DEFAULT: Final = "index." + DEFAULT_REGISTRY
_OFFICIAL: Final = "library/"
_LABEL: Final = r"(?:[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-]*[A-Za-z0-9])"
_HOST: Final = re.compile(rf"(?P<name>{_LABEL}(?:\.{_LABEL})*|\[[A-Fa-f0-9:.]+\])(?::(?P<port>[0-9]{{1,5}}))?")
_WORD: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY: Final = re.compile(rf"{_WORD}(?:/{_WORD})*")
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_ALGORITHM: Final = re.compile(r"(?P<algorithm>[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*):[0-9a-fA-F]{32,}")
_ID: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Reference:
    """One image of one registry. With a `digest` it is pinned; the tag is then only what it was called."""

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def name(self) -> str:
        """The whole name; parsing it gives this reference again."""
        return f"{self.registry}/{self.repository}{self._end}"

    @property
    def familiar(self) -> str:
        """As a person writes it."""
        if self.registry != DEFAULT_REGISTRY:
            return self.name
        short = self.repository.removeprefix(_OFFICIAL)
        if "/" not in short:
            return f"{short}{self._end}"
        # `a.b/c` would be read as the host `a.b`; `library/a/b` is not `a/b`.
        return self.name if _looks_like_host(short.partition("/")[0]) else f"{self.repository}{self._end}"

    @property
    def _end(self) -> str:
        return (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")

    def pinned(self, digest: str) -> Reference:
        """The same image by that digest."""
        return replace(self, digest=check_digest(digest))

    def tagged(self, tag: str) -> Reference:
        """Another tag of the same repository."""
        if not _TAG.fullmatch(tag):
            raise _bad(tag, "it is not a tag")
        return replace(self, tag=tag, digest=None)

    def __str__(self) -> str:
        return self.familiar


def parse(text: str, *, default_registry: str = DEFAULT_REGISTRY) -> Reference:
    """The reference that `text` means; `invalid_request` says what is wrong with it."""
    if not text or len(text) > TEXT_CHARS_MAX:
        raise _bad(text, f"a name has 1 to {TEXT_CHARS_MAX} characters")
    if _ID.fullmatch(text):
        raise _bad(text, "64 hexadecimal digits are a digest: write NAME@sha256:DIGITS")
    rest, at, digest = text.partition("@")
    if at:
        check_digest(digest)
    rest, tag = _split_tag(rest)
    if tag is not None and not _TAG.fullmatch(tag):
        raise _bad(text, "a tag has 1 to 128 letters, digits, '_', '.' and '-', and starts with none of '.-'")
    registry, repository = _split_host(rest, default_registry)
    registry = _checked_host(registry, text)
    if registry == DEFAULT_REGISTRY and "/" not in repository:
        repository = _OFFICIAL + repository
    _check_repository(repository, text)
    return Reference(registry, repository, tag or (None if at else DEFAULT_TAG), digest if at else None)


def check_digest(digest: str) -> str:
    """`digest`, or `invalid_request`. Only sha256: one algorithm, one way to be wrong."""
    if DIGEST.fullmatch(digest):
        return digest
    other = _ALGORITHM.fullmatch(digest[:TEXT_CHARS_MAX])
    if other and other["algorithm"] != "sha256":
        name = other["algorithm"]
        raise error("invalid_request", f"Digests by {shown(name)} are not supported, only sha256.")
    raise _bad(digest, "a digest is sha256: and 64 lower-case hexadecimal digits")


def is_digest(digest: object) -> bool:
    return isinstance(digest, str) and DIGEST.fullmatch(digest) is not None


def shown(text: str, chars_max: int = 200) -> str:
    """Text that somebody else chose, safe for a terminal and a log."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text[:chars_max])


def _split_tag(text: str) -> tuple[str, str | None]:
    """The last colon starts a tag, unless a slash follows it: then it is a port."""
    head, colon, tag = text.rpartition(":")
    if not colon or "/" in tag or tag.endswith("]"):
        return text, None
    return head, tag


def _split_host(text: str, default_registry: str) -> tuple[str, str]:
    first, slash, rest = text.partition("/")
    return (first, rest) if slash and _looks_like_host(first) else (default_registry, text)


def _looks_like_host(first: str) -> bool:
    """A dot, a port, `localhost`, or a capital letter."""
    return "." in first or ":" in first or first == "localhost" or first.lower() != first


def _checked_host(host: str, text: str) -> str:
    match = _HOST.fullmatch(host)
    if not match:
        raise _bad(text, "its first part is not the name of a host")
    name, port = match["name"].lower(), match["port"]
    if name.startswith("["):
        try:
            ipaddress.IPv6Address(name[1:-1])
        except ValueError:
            raise _bad(text, "its first part is not an IPv6 address") from None
    if port is not None and not 0 < int(port) <= PORT_MAX:
        raise _bad(text, "its port is not one")
    if port is None and name == _OLD_DEFAULT:
        return DEFAULT_REGISTRY
    return name if port is None else f"{name}:{port}"


def _check_repository(repository: str, text: str) -> None:
    if _REPOSITORY.fullmatch(repository):
        if len(repository) > REPOSITORY_CHARS_MAX:
            raise _bad(text, f"a repository's name has at most {REPOSITORY_CHARS_MAX} characters")
        return
    if _REPOSITORY.fullmatch(repository.lower()):
        raise _bad(text, "the name of a repository is in lower case")
    raise _bad(text, "a repository's name is words of a-z and 0-9, joined by '.', '_', '-' and '/'")


def _bad(text: str, why: str) -> ClocheError:
    return error("invalid_request", f"'{shown(text, 100)}' is not the name of an image: {why}.")
