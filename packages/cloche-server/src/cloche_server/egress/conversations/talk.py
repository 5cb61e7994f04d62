"""What a conversation is, and the times that bound each of its waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cloche_server.egress.gate import Gate
    from cloche_server.egress.guest_end import GuestEnd

FIRST_BYTE_S: Final = 10.0
HEAD_S: Final = 10.0
"""From the first byte of a head or hello to its last: however slowly they come."""

Conversation = Callable[["Gate", "GuestEnd"], Awaitable[None]]
