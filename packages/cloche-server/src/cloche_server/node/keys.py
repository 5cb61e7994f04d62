"""Idempotency keys: what was asked, as a hash, and the id that a key gives. Pure."""

from __future__ import annotations

import hashlib
from typing import Final

from cloche.wire.ids import LETTERS, LOCAL_CELL

_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


def request_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def command_of_key(sandbox: str, key: str) -> str:
    """The id that a key gives in this sandbox: a repeat finds the first one's directory, in this daemon or a later one."""
    number = int.from_bytes(hashlib.sha256(f"{sandbox} {key}".encode()).digest()[:16])
    tail = []
    for _ in range(16):
        number, digit = divmod(number, 36)
        tail.append(_DIGITS[digit])
    return LETTERS["command"] + LOCAL_CELL + "".join(tail)
