"""TLS on both sides: leaves of a lineage's own authority for clients, verified connections to servers."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import datetime
import ipaddress
import re
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from OpenSSL import SSL, crypto

_LEAVES_MAX: Final = 1000
_LEAF_LIFE: Final = datetime.timedelta(days=2)
_LEAF_RENEWED_BEFORE_END: Final = datetime.timedelta(days=1)
_CLOCK_SKEW: Final = datetime.timedelta(hours=1)
_OPTIONS: Final = SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION | SSL.OP_NO_TICKET
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class Authority:
    """One lineage's authority. Its leaves share a key of their own, made here; the authority's key signs only."""

    def __init__(self, cert: bytes, key: bytes) -> None:
        self._cert = x509.load_pem_x509_certificate(cert)
        self._key: Any = serialization.load_pem_private_key(key, None)
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._key_id = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
            self._cert.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        )
        self._leaves: dict[str, tuple[SSL.Context, datetime.datetime]] = {}

    def server_side(self, host: str, protocol: bytes | None) -> SSL.Connection:
        """To speak as `host` with a client, which gets `protocol` if it offers it."""
        connection = SSL.Connection(self._context(host))
        connection.set_app_data(protocol)
        connection.set_accept_state()
        return connection

    def _context(self, host: str) -> SSL.Context:
        now = datetime.datetime.now(datetime.UTC)
        context, renewed = self._leaves.get(host, (None, now))
        if context is not None and renewed > now:
            return context
        context = SSL.Context(SSL.TLS_SERVER_METHOD)
        context.set_min_proto_version(SSL.TLS1_2_VERSION)
        context.set_options(_OPTIONS)
        context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
        context.set_verify(SSL.VERIFY_NONE, None)
        context.set_alpn_select_callback(_mirror)
        context.use_certificate(self._leaf(host, now))
        context.use_privatekey(self._leaf_key)
        if len(self._leaves) >= _LEAVES_MAX:
            self._leaves.pop(next(iter(self._leaves)))
        self._leaves[host] = (context, now + _LEAF_LIFE - _LEAF_RENEWED_BEFORE_END)
        return context

    def _leaf(self, host: str, now: datetime.datetime) -> x509.Certificate:
        address = address_of(host)
        name = x509.DNSName(host) if address is None else x509.IPAddress(address)
        return (
            x509.CertificateBuilder()
            .issuer_name(self._cert.subject)
            .subject_name(x509.Name([]))
            .public_key(self._leaf_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + _LEAF_LIFE)
            .add_extension(x509.SubjectAlternativeName([name]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(self._key_id, critical=False)
            .sign(self._key, hashes.SHA256())
        )


def _mirror(connection: SSL.Connection, offers: list[bytes]) -> Any:
    """The protocol that the server chose, never another."""
    wanted = connection.get_app_data()
    return wanted if wanted and wanted in offers else SSL.NO_OVERLAPPING_PROTOCOLS


class Roots:
    """What servers are verified against."""

    def __init__(self, pem: str) -> None:
        self._context = SSL.Context(SSL.TLS_CLIENT_METHOD)
        self._context.set_min_proto_version(SSL.TLS1_2_VERSION)
        self._context.set_options(_OPTIONS)
        self._context.set_verify(SSL.VERIFY_PEER, None)
        store = self._context.get_cert_store()
        for block in _PEM.findall(pem):
            store.add_cert(crypto.load_certificate(crypto.FILETYPE_PEM, block.encode()))

    def client_side(self, host: str, offers: list[bytes]) -> SSL.Connection:
        """To speak with a server that must prove to be `host`."""
        connection = SSL.Connection(self._context)
        # pyOpenSSL has no public way to set the name that is verified; mitmproxy does the same.
        lib: Any = SSL._lib
        param = lib.SSL_get0_param(connection._ssl)
        lib.X509_VERIFY_PARAM_set_hostflags(param, lib.X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS)
        address = address_of(host)
        if address is not None:
            done = lib.X509_VERIFY_PARAM_set1_ip(param, address.packed, len(address.packed))
        else:
            name = host.encode("ascii")
            connection.set_tlsext_host_name(name)
            done = lib.X509_VERIFY_PARAM_set1_host(param, name, len(name))
        if done != 1:
            raise ValueError("the name that the server must have could not be set")
        if offers:
            connection.set_alpn_protos(offers)
        connection.set_connect_state()
        return connection


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """When the host is an address and not a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
