"""A connection to the proxy address inside: its first byte says whether it speaks HTTP or SOCKS."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from cloche_server.channel import JsonObject
from cloche_server.egress import refusals
from cloche_server.egress.attempt import Refused
from cloche_server.egress.conversations import socks
from cloche_server.egress.conversations.carry import carry
from cloche_server.egress.conversations.talk import FIRST_BYTE_S, HEAD_S, Conversation
from cloche_server.egress.environment import SLOTS_MAX
from cloche_server.egress.fields import BadRequest
from cloche_server.egress.forward import Forward
from cloche_server.egress.guest_end import GuestEnd, GuestGone
from cloche_server.egress.heads import Head, RequestReader

if TYPE_CHECKING:
    from cloche_server.egress.gate import Gate

ESTABLISHED: Final = b"HTTP/1.1 200 Connection established\r\n\r\n"
_SOCKS: Final = b"\x05"


def of(fields: JsonObject) -> Conversation | None:
    slot = fields.get("slot", 0)
    if type(slot) is not int or not 0 <= slot <= SLOTS_MAX:
        return None

    async def converse(gate: Gate, guest: GuestEnd) -> None:
        first = await guest.read(FIRST_BYTE_S)
        if not first:
            guest.end_ok()
        elif first.startswith(_SOCKS):
            await socks.converse(gate, guest, slot, first)
        else:
            await _http(gate, guest, slot, first)

    return converse


async def _http(gate: Gate, guest: GuestEnd, slot: int, first: bytes) -> None:
    reader = RequestReader()
    try:
        async with asyncio.timeout(HEAD_S):
            head = await _head(guest, reader, first)
    except (BadRequest, TimeoutError) as bad:
        slow = isinstance(bad, TimeoutError)
        refused = Refused("timed_out" if slow else "bad_request", "the head took too long" if slow else str(bad))
        gate.record_bad_request(slot, refused.text, refused.code)
        guest.finish(refusals.http(refused, sandbox=gate.who.sandbox))
        return
    if head.form != "connect":
        await _forward(gate, guest, slot, reader, head)
        return
    try:
        attempt = await gate.attempt(head.host, head.port, slot=slot)
    except Refused as refused:
        guest.finish(refusals.http(refused, sandbox=gate.who.sandbox, host=head.host, port=head.port))
        return
    guest.say(ESTABLISHED)
    await carry(gate, guest, attempt, reader.rest)


async def _forward(gate: Gate, guest: GuestEnd, slot: int, reader: RequestReader, head: Head) -> None:
    if head.form == "absolute":
        await Forward(gate, guest, slot=slot, reader=reader).begin_with(head)
        return
    refused = Refused("bad_request", "a request to a proxy names the whole URL")
    gate.record_bad_request(slot, refused.text)
    guest.finish(refusals.http(refused, sandbox=gate.who.sandbox))


async def _head(guest: GuestEnd, reader: RequestReader, first: bytes) -> Head:
    data = first
    while True:
        reader.feed(data)
        event = reader.next_event()
        if event is not None:
            assert isinstance(event, Head), "a request begins with its head"
            return event
        data = await guest.read(HEAD_S)
        if not data:
            raise GuestGone("it closed before it asked")
