"""What certificates are believed: by a guest (its lineage's authority beside the node's roots) and by the interceptor.

The guest gets `trust.pem`, and the same as a Java key store (JKS: every Java reads it, and it is a list with a digest behind it).
"""

from __future__ import annotations

import hashlib
import re
import ssl
import struct
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche.wire.errors import error

BUNDLES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
BUNDLE_BYTES_MAX: Final = 2 * 1024 * 1024
JAVA_PASSWORD: Final = "changeit"
_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----\s+([A-Za-z0-9+/=\s]+?)-----END CERTIFICATE-----")
_MAGIC: Final = 0xFEEDFEED
_VERSION: Final = 2
_TRUSTED: Final = 2
_SALT: Final = b"Mighty Aphrodite"


@dataclass(frozen=True)
class Trust:
    """For one guest."""

    pem: bytes
    java: bytes | None


def roots(extra: Path | None = None) -> bytes:
    """The node's own bundle and the organisation's file, as PEM. Without any bundle: nothing is believed."""
    found = b"".join(f"{line}\n".encode() for line in _pem_of(system_bundle()))
    if extra is None:
        return found
    try:
        more = list(_pem_of(extra.read_bytes()[:BUNDLE_BYTES_MAX]))
    except OSError as bad:
        raise error("policy_invalid", f"The certificates {extra} cannot be read: {bad.strerror}.") from None
    if not more:
        raise error("policy_invalid", f"{extra} has no certificate in it.")
    return found + b"".join(f"{line}\n".encode() for line in more)


def system_bundle() -> bytes:
    places = ssl.get_default_verify_paths()
    named = [place for place in (places.cafile, places.openssl_cafile) if place]
    for place in (*named, *BUNDLES):
        try:
            with open(place, "rb") as file:
                return file.read(BUNDLE_BYTES_MAX)
        except OSError:  # the next one
            continue
    return b""


def trust_for(certificate: bytes, node_roots: bytes) -> Trust:
    """`certificate` is the lineage authority's, PEM."""
    pem = certificate.rstrip() + b"\n" + node_roots
    return Trust(pem, java_store(ders(pem)))


def ders(pem: bytes) -> Iterator[bytes]:
    """Each certificate once."""
    seen: set[bytes] = set()
    for found in _PEM.finditer(pem):
        try:
            der = b64decode(b"".join(found[1].split()), validate=True)
        except NotBase64:
            continue
        if der not in seen:
            seen.add(der)
            yield der


def java_store(certificates: Iterable[bytes], *, at_ms: int = 0) -> bytes:
    """A JKS store of trusted certificates. Equal input gives equal bytes."""
    entries = list(certificates)
    store = bytearray(struct.pack(">III", _MAGIC, _VERSION, len(entries)))
    for number, der in enumerate(entries):
        store += struct.pack(">I", _TRUSTED) + _utf(f"cloche-{number}") + struct.pack(">q", at_ms)
        store += _utf("X.509") + struct.pack(">I", len(der)) + der
    digest = hashlib.sha1(JAVA_PASSWORD.encode("utf-16-be") + _SALT + store, usedforsecurity=False)
    return bytes(store) + digest.digest()


def _utf(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode("ascii")


def _pem_of(text: bytes) -> Iterator[str]:
    for found in _PEM.finditer(text):
        yield found[0].decode("ascii")
