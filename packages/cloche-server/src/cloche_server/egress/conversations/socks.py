"""SOCKS 5: for TCP that is neither HTTP nor asked for by a name's own address."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cloche_server.egress.attempt import Refused
from cloche_server.egress.conversations.carry import carry
from cloche_server.egress.conversations.talk import HEAD_S
from cloche_server.egress.guest_end import GuestEnd
from cloche_server.egress.socks import (
    REPLY_FAILURE,
    REPLY_NOT_ALLOWED,
    REPLY_OK,
    REPLY_UNREACHABLE,
    Answer,
    BadSocks,
    Connect,
    SocksReader,
    reply,
)

if TYPE_CHECKING:
    from cloche_server.egress.gate import Gate

_REPLIES = {"unresolved": REPLY_UNREACHABLE, "unreachable": REPLY_UNREACHABLE, "internal": REPLY_FAILURE}


async def converse(gate: Gate, guest: GuestEnd, slot: int, early: bytes) -> None:
    reader = SocksReader()
    try:
        async with asyncio.timeout(HEAD_S):
            asked = await _asked(guest, reader, early)
        attempt = await gate.attempt(asked.target.host, asked.target.port, slot=slot)
    except BadSocks as bad:
        gate.record_bad_request(slot, f"a SOCKS request that is not taken: {bad.reason}")
        guest.finish(bad.answer)
        return
    except Refused as refused:
        guest.finish(reply(_REPLIES.get(refused.code, REPLY_NOT_ALLOWED)))
        return
    guest.say(reply(REPLY_OK))
    await carry(gate, guest, attempt, reader.rest)


async def _asked(guest: GuestEnd, reader: SocksReader, early: bytes) -> Connect:
    data = early
    while True:
        reader.feed(data)
        while (event := reader.next_event()) is not None:
            if isinstance(event, Connect):
                return event
            assert isinstance(event, Answer)
            guest.say(event.data)
        data = await guest.read(HEAD_S)
        if not data:
            raise BadSocks("it closed before it asked")
