"""One-time tokens: given to a webhook, kept here only as their hash."""

from __future__ import annotations

import hashlib
import secrets
from typing import Final

TOKEN_BYTES: Final = 32
TOKEN_CHARS_MAX: Final = 128


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def digest_of(token: str) -> bytes:
    return hashlib.sha256(token[:TOKEN_CHARS_MAX].encode()).digest()
