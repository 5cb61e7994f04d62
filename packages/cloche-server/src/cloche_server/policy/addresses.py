"""Which addresses a guest is never let through to, whatever the name that led there.

Only what is routed on the public internet passes. An address that carries an IPv4 address in it (mapped, NAT64,
6to4, Teredo, ISATAP) is as good as the one that it carries. Unknown to this table, because no address shows it:
a NAT64 prefix of the operator's own, and a public address that a cloud routes to a service of its own.
"""

from __future__ import annotations

from collections.abc import Container
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

from cloche_server.policy.model import Address

TEXTS: Final = {
    "loopback": "it is loopback, the node itself",
    "unspecified": "it is the unspecified address, which means the node itself",
    "own": "it is an address of the node itself",
    "link_local": "it is link-local",
    "metadata": "it is a cloud's metadata service",
    "private": "it is private",
    "cgnat": "it is shared address space of a provider (100.64.0.0/10)",
    "multicast": "it is multicast",
    "broadcast": "it is broadcast",
    "documentation": "it is reserved for documentation",
    "reserved": "it is reserved",
}
"""Each code, for a person."""

METADATA: Final = frozenset(
    ip_address(text)
    for text in (
        "169.254.169.254",  # nearly all of them
        "169.254.170.2",  # ECS tasks
        "169.254.170.23",  # EKS pods
        "169.254.169.253",  # VPC resolver
        "169.254.0.23",  # Tencent
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure's wire server: a public number
        "192.0.0.192",  # Oracle
        "fd00:ec2::254",
        "fd00:ec2::23",
        "fd00:ec2::253",
        "fd20:ce::254",  # Google
        "fd00:c1::a9fe:a9fe",  # Oracle
        "fd00:42::42",  # Scaleway
        "fd00:a9fe:a9fe::1",
        "fd00:100::100:200",
    )
)

_V4: Final = (
    ("0.0.0.0/8", "unspecified"),
    ("127.0.0.0/8", "loopback"),
    ("169.254.0.0/16", "link_local"),
    ("10.0.0.0/8", "private"),
    ("172.16.0.0/12", "private"),
    ("192.168.0.0/16", "private"),
    ("100.64.0.0/10", "cgnat"),
    ("192.0.2.0/24", "documentation"),
    ("198.51.100.0/24", "documentation"),
    ("203.0.113.0/24", "documentation"),
    ("192.0.0.0/24", "reserved"),
    ("192.88.99.0/24", "reserved"),
    ("198.18.0.0/15", "reserved"),
    ("224.0.0.0/4", "multicast"),
    ("255.255.255.255/32", "broadcast"),
    ("240.0.0.0/4", "reserved"),
)
_V6: Final = (
    ("::/128", "unspecified"),
    ("::1/128", "loopback"),
    ("fd00:ec2::/32", "metadata"),
    ("fe80::/10", "link_local"),
    ("fec0::/10", "private"),
    ("fc00::/7", "private"),
    ("ff00::/8", "multicast"),
    ("2001:db8::/32", "documentation"),
    ("3fff::/20", "documentation"),
    ("2001::/23", "reserved"),
)


def _table(rows: tuple[tuple[str, str], ...], kind: type[IPv4Network | IPv6Network]) -> list[tuple[int, int, str]]:
    networks = [(kind(text), code) for text, code in rows]
    return [(int(network.netmask), int(network.network_address), code) for network, code in networks]


_TABLE_4: Final = _table(_V4, IPv4Network)
_TABLE_6: Final = _table(_V6, IPv6Network)

_MAPPED: Final = int(IPv6Address("::ffff:0:0")) >> 32
_COMPATIBLE: Final = 0
_TRANSLATED: Final = int(IPv6Address("::ffff:0:0:0")) >> 32
_NAT64: Final = int(IPv6Address("64:ff9b::")) >> 32
_TEREDO: Final = 0x20010000
_SIX_TO_FOUR: Final = 0x2002
_ISATAP: Final = frozenset({0x00005EFE, 0x02005EFE})
_GLOBAL_UNICAST: Final = 0b001
"""2000::/3, the only part of IPv6 that is given out for public use."""


def refusal(address: Address, own: Container[Address] = ()) -> str | None:
    """Why nobody may be let through to this address, a key of TEXTS; None if it is public. `own`: the node's."""
    if address in METADATA:
        return "metadata"
    if address in own:
        return "own"
    if isinstance(address, IPv4Address):
        return _found(_TABLE_4, int(address))
    if address.scope_id is not None:
        return "link_local"
    return _refusal_6(address, own)


def _refusal_6(address: IPv6Address, own: Container[Address]) -> str | None:
    number = int(address)
    if number <= 1:
        return _found(_TABLE_6, number)
    carried = embedded(address)
    for each in carried:
        code = refusal(each, own)
        if code is not None:
            return code
    if number >> 32 in (_MAPPED, _NAT64) or number >> 96 == _TEREDO:
        return None
    code = _found(_TABLE_6, number)
    if code is None and number >> 125 != _GLOBAL_UNICAST:
        return "reserved"
    return code


def embedded(address: IPv6Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses that an IPv6 address carries in one of the known ways."""
    number = int(address)
    low = number & 0xFFFFFFFF
    if number >> 32 in (_MAPPED, _COMPATIBLE, _TRANSLATED, _NAT64):
        return (IPv4Address(low),)
    if number >> 80 == int(IPv6Address("64:ff9b:1::")) >> 80:
        return (IPv4Address(low),)
    if number >> 112 == _SIX_TO_FOUR:
        return (IPv4Address(number >> 80 & 0xFFFFFFFF),)
    if number >> 96 == _TEREDO:
        return IPv4Address(number >> 64 & 0xFFFFFFFF), IPv4Address(low ^ 0xFFFFFFFF)
    if number >> 32 & 0xFFFFFFFF in _ISATAP:
        return (IPv4Address(low),)
    return ()


def _found(table: list[tuple[int, int, str]], number: int) -> str | None:
    for mask, network, code in table:
        if number & mask == network:
            return code
    return None
