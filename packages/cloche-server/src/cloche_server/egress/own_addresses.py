"""The node's own addresses, public ones too: a sandbox must not reach the node through them."""

from __future__ import annotations

import ipaddress
import time
from pathlib import Path
from typing import Final

from cloche_server.policy.model import Address

KEPT_S: Final = 5.0
_FOUR: Final = Path("/proc/net/fib_trie")
_SIX: Final = Path("/proc/net/if_inet6")


class OwnAddresses:
    """Asked at each connection; the kernel is asked every few seconds."""

    def __init__(self) -> None:
        self._found: frozenset[Address] = frozenset()
        self._until = 0.0

    def __call__(self) -> frozenset[Address]:
        now = time.monotonic()
        if now >= self._until:
            found = _four(_FOUR.read_text()) | _six(_SIX)
            self._found = frozenset(each for each in found if not each.is_loopback)  # those have a kind of their own
            self._until = now + KEPT_S
        return self._found


def _four(trie: str) -> set[Address]:
    """An address is the line `|-- A.B.C.D`, and it is our own when `/32 host LOCAL` follows."""
    found: set[Address] = set()
    last = ""
    for line in trie.splitlines():
        if "|-- " in line:
            last = line.rpartition("|-- ")[2].strip()
        elif "/32 host LOCAL" in line and last:
            found.add(ipaddress.ip_address(last))
    return found


def _six(path: Path) -> set[Address]:
    if not path.exists():
        return set()
    return {ipaddress.IPv6Address(bytes.fromhex(line.split()[0])) for line in path.read_text().splitlines() if line}
