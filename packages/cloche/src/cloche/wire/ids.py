"""Ids: 20 characters of [a-z0-9]; the first tells the kind, the next three the cell.

Legal in a host name, split nowhere, safe in a path. Any unique prefix works at the CLI.
"""

from __future__ import annotations

import re
import secrets
from typing import Final, Literal

Kind = Literal["sandbox", "command", "lineage", "tenant", "event", "grant", "approval"]

ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"
LENGTH: Final = 20
LETTERS: Final[dict[Kind, str]] = {
    "sandbox": "s",
    "command": "c",
    "lineage": "l",
    "tenant": "t",
    "event": "e",
    "grant": "g",
    "approval": "a",
}
LOCAL_CELL: Final = "loc"
DEFAULT_TENANT: Final = "t" + LOCAL_CELL + "0" * 16
PATTERN: Final = re.compile(r"[a-z][a-z0-9]{19}")


def new_id(kind: Kind, cell: str = LOCAL_CELL) -> str:
    assert len(cell) == 3, cell
    number = secrets.randbits(128)  # one question to the kernel, and 45 bits more than 16 characters hold
    tail = []
    for _ in range(LENGTH - 4):
        number, digit = divmod(number, len(ALPHABET))
        tail.append(ALPHABET[digit])
    return LETTERS[kind] + cell + "".join(tail)


def is_id(text: str, kind: Kind) -> bool:
    return bool(PATTERN.fullmatch(text)) and text[0] == LETTERS[kind]


def short(full: str) -> str:
    """What people see in tables: the kind and the first random characters (the cell says nothing on one machine)."""
    return full[0] + full[4:9] if full[1:4] == LOCAL_CELL else full[:9]


def matches_prefix(full: str, prefix: str) -> bool:
    """True when `prefix` is a prefix of the id or of its short form."""
    return full.startswith(prefix) or (full[1:4] == LOCAL_CELL and (full[0] + full[4:]).startswith(prefix))
