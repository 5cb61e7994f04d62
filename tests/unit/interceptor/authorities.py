"""Authorities and leaves for tests: what a lineage's authority and the world's servers have."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, both PEM."""

    cert: str
    key: str


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def authority(name: str) -> Pair:
    """A root that may sign leaves."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    cert = (
        x509.CertificateBuilder()
        .issuer_name(subject)
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(cert.public_bytes(serialization.Encoding.PEM).decode(), _pem(key))


def leaf(root: Pair, *names: str) -> Pair:
    """A server's certificate for these names."""
    issuer = x509.load_pem_x509_certificate(root.cert.encode())
    signer = serialization.load_pem_private_key(root.key.encode(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    issuer_id = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    cert = (
        x509.CertificateBuilder()
        .issuer_name(issuer.subject)
        .subject_name(x509.Name([]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return Pair(cert.public_bytes(serialization.Encoding.PEM).decode(), _pem(key))


def server_context(directory: Path, pair: Pair, *protocols: str) -> ssl.SSLContext:
    """For a server with that certificate, which speaks these protocols."""
    file = directory / f"{abs(hash(pair.cert))}.pem"
    file.write_text(pair.cert + pair.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def client_context(root: Pair, *protocols: str) -> ssl.SSLContext:
    """For a client that trusts that root alone."""
    context = ssl.create_default_context(cadata=root.cert)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context
