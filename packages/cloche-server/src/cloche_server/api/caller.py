"""Who asks. A unix socket's peer is named by the kernel; over TCP a key, an exact Host and a listed Origin decide.

Pure: from a peer, the request's headers and the node's rules to a `Caller`, or an error by name.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloche.wire.errors import error
from cloche.wire.ids import DEFAULT_TENANT
from cloche_server.api.backend import Caller

Headers = Iterable[tuple[bytes, bytes]]

KEY_BYTES_MAX: Final = 512
"""A longer key is refused before it is hashed."""


@dataclass(frozen=True)
class Peer:
    """The other end: `uid` from SO_PEERCRED, or None for a connection over TCP."""

    uid: int | None


@dataclass(frozen=True)
class ApiKey:
    """A key as the node keeps it: never the key itself."""

    name: str
    digest: bytes
    is_admin: bool = False

    @classmethod
    def of(cls, name: str, secret: str, *, is_admin: bool = False) -> ApiKey:
        return cls(name, hashlib.sha256(secret.encode()).digest(), is_admin)


@dataclass(frozen=True)
class TcpConfig:
    """Listening on TCP, only when asked for."""

    host: str
    port: int
    keys: tuple[ApiKey, ...]
    allowed_hosts: frozenset[str] = frozenset()
    """Exact values of the Host header. On loopback, empty means `localhost`, `127.0.0.1`, `[::1]` with the port."""
    allowed_origins: frozenset[str] = frozenset()
    tls_certificate: Path | None = None
    tls_key: Path | None = None

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def has_tls(self) -> bool:
        return self.tls_certificate is not None and self.tls_key is not None


@dataclass(frozen=True)
class Rules:
    """What the gate goes by."""

    admin_uids: frozenset[int] = frozenset({0})
    keys: tuple[ApiKey, ...] = ()
    allowed_hosts: frozenset[str] = frozenset()
    allowed_origins: frozenset[str] = frozenset()
    nobody_uid: int | None = None
    """The uid that stands for every user our user namespace does not map; such a peer is nobody in particular."""
    tenant: str = DEFAULT_TENANT


def check_tcp(tcp: TcpConfig) -> None:
    """Refuses, by name, to listen in a way that would let strangers in."""
    if not tcp.keys:
        raise error("key_required", f"The node will not listen on {tcp.host}:{tcp.port} without an API key.")
    if not tcp.has_tls and not tcp.is_loopback:
        raise error(
            "tls_required", f"The node will not listen on {tcp.host}:{tcp.port} without TLS: it is not loopback."
        )
    if not tcp.allowed_hosts and not tcp.is_loopback:
        raise error(
            "host_refused", f"The node will not listen on {tcp.host}:{tcp.port} without a list of allowed hosts."
        )


def make_rules(tcp: TcpConfig | None, admin_uids: frozenset[int] | None = None) -> Rules:
    """`admin_uids` None: root and the user this process runs as."""
    admins = frozenset({0, os.geteuid()}) if admin_uids is None else admin_uids
    if tcp is None:
        return Rules(admin_uids=admins, nobody_uid=_nobody_uid())
    hosts = tcp.allowed_hosts
    if not hosts:
        hosts = frozenset(f"{name}:{tcp.port}" for name in ("localhost", "127.0.0.1", "[::1]"))
    return Rules(admins, tcp.keys, hosts, tcp.allowed_origins, _nobody_uid())


def identify(peer: Peer | None, headers: Headers, rules: Rules) -> Caller:
    """The caller, or an error. A connection that no listener of ours described is refused."""
    host: list[bytes] = []
    authorization: list[bytes] = []
    for raw_name, value in headers:
        name = raw_name.lower()
        if name == b"origin" and value.decode("latin-1") not in rules.allowed_origins:
            raise error("origin_refused", "Requests from web pages of this origin are not allowed.")
        if name == b"host":
            host.append(value)
        elif name == b"authorization":
            authorization.append(value)
    if peer is None:
        raise error("unauthenticated", "The connection does not say who is at its other end.")
    if peer.uid is not None:
        return _local_user(peer.uid, rules)
    if len(host) != 1 or host[0].decode("latin-1").lower() not in rules.allowed_hosts:
        raise error("host_refused", "The Host header does not name this node.")
    return _key_holder(authorization, rules)


def _local_user(uid: int, rules: Rules) -> Caller:
    if uid == rules.nobody_uid:
        raise error("node_refused", "Your user is not mapped into the namespace the node runs in.")
    return Caller(rules.tenant, f"uid:{uid}", uid in rules.admin_uids)


def _key_holder(authorization: list[bytes], rules: Rules) -> Caller:
    scheme, _, secret = (authorization[0] if len(authorization) == 1 else b"").partition(b" ")
    if scheme.lower() != b"bearer" or not 0 < len(secret) <= KEY_BYTES_MAX:
        raise error("unauthenticated", "The request carries no API key.")
    digest = hashlib.sha256(secret.strip()).digest()
    found: ApiKey | None = None
    for key in rules.keys:  # all of them, so that the time does not tell which
        if hmac.compare_digest(digest, key.digest):
            found = key
    if found is None:
        raise error("unauthenticated", "The API key is not one of this node's.")
    return Caller(rules.tenant, f"key:{found.name}", found.is_admin)


def _nobody_uid() -> int | None:
    """In the first user namespace every uid is itself; elsewhere the overflow uid means "somebody not mapped here"."""
    try:
        fields = Path("/proc/self/uid_map").read_text().split()
        if fields == ["0", "0", "4294967295"]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except OSError:
        return None
