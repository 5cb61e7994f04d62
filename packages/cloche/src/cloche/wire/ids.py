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
_DIGIT_OF: Final = bytes(ord(ALPHABET[byte % len(ALPHABET)]) for byte in range(256))
_REFUSED: Final = bytes(range(256 - 256 % len(ALPHABET), 256))
"""Bytes that would make some digits likelier than others."""


def new_id(kind: Kind, cell: str = LOCAL_CELL) -> str:
    assert len(cell) == 3, cell
    tail = b""
    while len(tail) < LENGTH - 4:  # hardly ever twice: four in 256 bytes are refused
        tail = secrets.token_bytes(32).translate(_DIGIT_OF, _REFUSED)[: LENGTH - 4]
    return LETTERS[kind] + cell + tail.decode()


def is_id(text: str, kind: Kind) -> bool:
    return bool(PATTERN.fullmatch(text)) and text[0] == LETTERS[kind]


def short(full: str) -> str:
    """What people see in tables: the kind and the first random characters (the cell says nothing on one machine)."""
    return full[0] + full[4:9] if full[1:4] == LOCAL_CELL else full[:9]


def matches_prefix(full: str, prefix: str) -> bool:
    """True when `prefix` is a prefix of the id or of its short form."""
    return full.startswith(prefix) or (full[1:4] == LOCAL_CELL and (full[0] + full[4:]).startswith(prefix))
