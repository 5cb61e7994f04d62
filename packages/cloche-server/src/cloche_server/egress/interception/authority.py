"""A certificate authority per lineage: what a guest is told to trust, and what the interceptor signs with.

The key is made here, sealed on disk by the box (`secrets`), told to the interceptor, and never in the guest. It is the same after a
daemon's restart, because the guest trusts it; it goes with the lineage's last sandbox.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAYS: Final = 30
SKEW: Final = timedelta(hours=24)
"""A guest's clock may be behind."""
FILE_BYTES_MAX: Final = 64 * 1024
_ID: Final = re.compile(r"[a-z][a-z0-9]{19}")


class Box(Protocol):
    """Seals with a key that is not in the data directory (`secrets.box`)."""

    def seal(self, data: bytes, about: bytes) -> bytes: ...

    def open(self, sealed: bytes, about: bytes) -> bytes: ...


@dataclass(frozen=True)
class Authority:
    """One lineage's. `certificate` and `key` are PEM."""

    lineage: str
    certificate: bytes
    key: bytes = field(repr=False)
    not_after: datetime

    @property
    def der(self) -> bytes:
        return x509.load_pem_x509_certificate(self.certificate).public_bytes(serialization.Encoding.DER)


class Authorities:
    """All that are kept, one file each."""

    def __init__(self, directory: Path, box: Box) -> None:
        self._directory = directory
        self._box = box
        self._known: dict[str, Authority] = {}

    def of(self, lineage: str, *, max_age_s: float = 0.0) -> Authority:
        """The one that is kept, or a new one. `secret_unavailable` when it is kept and its key cannot be had."""
        found = self._known.get(lineage) or self._read(lineage)
        if found is None or found.not_after <= datetime.now(UTC):
            found = make(lineage, max_age_s=max_age_s)
            self._write(found)
        self._known[lineage] = found
        return found

    def remove(self, lineage: str) -> None:
        self._known.pop(lineage, None)
        self._path(lineage).unlink(missing_ok=True)

    def keep_only(self, lineages: set[str]) -> None:
        """After a daemon's start: what belongs to nobody any more goes."""
        if self._directory.is_dir():
            for path in list(self._directory.iterdir()):
                if path.name not in lineages:
                    path.unlink()
        for lineage in set(self._known) - lineages:
            del self._known[lineage]

    def _path(self, lineage: str) -> Path:
        if not _ID.fullmatch(lineage):
            raise ValueError("not a lineage")
        return self._directory / lineage

    def _read(self, lineage: str) -> Authority | None:
        try:
            with self._path(lineage).open("rb") as file:
                kept = json.loads(file.read(FILE_BYTES_MAX))
        except FileNotFoundError:
            return None
        key = self._box.open(bytes.fromhex(kept["key"]), _about(lineage))
        certificate = kept["certificate"].encode()
        not_after = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
        return Authority(lineage, certificate, key, not_after)

    def _write(self, made: Authority) -> None:
        sealed = self._box.seal(made.key, _about(made.lineage))
        content: dict[str, Any] = {"certificate": made.certificate.decode(), "key": sealed.hex()}
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._path(made.lineage)
        fresh = path.with_name(f".{path.name}")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(fd, "wb") as file:
            file.write(json.dumps(content).encode())
        fresh.replace(path)


def _about(lineage: str) -> bytes:
    return f"authority of {lineage}".encode()


def make(lineage: str, *, max_age_s: float = 0.0, now: datetime | None = None) -> Authority:
    """It signs leaves and nothing else, for as long as a sandbox of the lineage may live."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Cloche"),
            x509.NameAttribute(NameOID.COMMON_NAME, f"Cloche interception of {lineage}"),
        ]
    )
    now = (now or datetime.now(UTC)).replace(microsecond=0)
    not_after = now + max(timedelta(days=DAYS), timedelta(seconds=max_age_s) + SKEW)
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(not_after)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(
        lineage,
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        not_after,
    )
