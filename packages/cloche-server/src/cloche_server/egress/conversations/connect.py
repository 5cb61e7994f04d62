"""A program connected to the address that stands for a name inside: the same steps as for a proxy, without its words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cloche_server.channel import JsonObject
from cloche_server.egress.attempt import Refused
from cloche_server.egress.conversations.carry import carry, refuse_in_its_words
from cloche_server.egress.conversations.talk import Conversation
from cloche_server.egress.guest_end import GuestEnd

if TYPE_CHECKING:
    from cloche_server.egress.gate import Gate

REFUSED_WAIT_S: Final = 2.0
"""How long a refused client may take to say what it speaks, so that it is refused in its own words."""


def of(fields: JsonObject) -> Conversation | None:
    name, port = fields.get("name"), fields.get("port")
    if not isinstance(name, str) or len(name) > 253 or type(port) is not int or not 1 <= port <= 65535:
        return None

    async def converse(gate: Gate, guest: GuestEnd) -> None:
        try:
            attempt = await gate.attempt(name, port)
        except Refused as refused:
            await _refuse(gate, guest, refused, name, port)
            return
        await carry(gate, guest, attempt, b"")

    return converse


async def _refuse(gate: Gate, guest: GuestEnd, refused: Refused, name: str, port: int) -> None:
    try:
        first = await guest.read(REFUSED_WAIT_S)
    except TimeoutError:
        first = b""
    refuse_in_its_words(gate, guest, refused, first, name, port)
