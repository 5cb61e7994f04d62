"""What an allowed connection must carry is seen to here, before the first of its bytes goes out (NET-5)."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final

from cloche_server.egress import refusals
from cloche_server.egress.attempt import Attempt, Refused
from cloche_server.egress.connection import Connection
from cloche_server.egress.conversations.talk import FIRST_BYTE_S, HEAD_S
from cloche_server.egress.forward import Forward
from cloche_server.egress.guest_end import GuestEnd
from cloche_server.egress.hello import Hello, HelloParser, NotTls
from cloche_server.policy.model import Carries

if TYPE_CHECKING:
    from cloche_server.egress.gate import Gate

_TLS_HANDSHAKE: Final = b"\x16"
_LOOKS_LIKE_HTTP: Final = re.compile(rb"[A-Z]{3,20} ")


async def carry(gate: Gate, guest: GuestEnd, attempt: Attempt, early: bytes) -> None:
    """Hands the connection over to a relay, or refuses it. Whatever happens, the attempt's socket has an owner."""
    whole = bytearray(early)
    try:
        assert attempt.decision is not None
        carries = attempt.decision.carries
        if carries is Carries.WEB:
            whole += b"" if whole else await _first(guest)
            carries = Carries.TLS if whole.startswith(_TLS_HANDSHAKE) else Carries.HTTP
            if attempt.intercepted:
                await gate.intercept(attempt, tls=carries is Carries.TLS)
        if carries is Carries.TLS:
            await _read_hello(gate, guest, attempt, whole)
    except Refused as refused:
        gate.refuse(attempt, refused)
        refuse_in_its_words(gate, guest, refused, bytes(whole), attempt.host, attempt.port)
        return
    except BaseException:
        attempt.drop_socket()
        gate.release(attempt, "guest_gone")
        raise
    if carries is Carries.HTTP:
        Forward(gate, guest).begin_within(attempt, bytes(whole))
        return
    connection = Connection(gate, guest, attempt)
    guest.flow_to(connection.relay, bytes(whole))
    connection.relay.start()


def refuse_in_its_words(gate: Gate, guest: GuestEnd, refused: Refused, first: bytes, host: str, port: int) -> None:
    """TLS and HTTP have words for it; to all else the connection is reset."""
    if first.startswith(_TLS_HANDSHAKE):
        guest.finish(refusals.TLS_ACCESS_DENIED)
    elif _LOOKS_LIKE_HTTP.match(first):
        guest.finish(refusals.http(refused, sandbox=gate.who.sandbox, host=host, port=port))
    else:
        guest.reset(refused.code)


async def _first(guest: GuestEnd) -> bytes:
    try:
        return await guest.read(FIRST_BYTE_S)
    except TimeoutError:
        raise Refused("timed_out", "nothing was sent") from None


async def _read_hello(gate: Gate, guest: GuestEnd, attempt: Attempt, whole: bytearray) -> None:
    """Adds to `whole` all bytes up to the end of the hello, which must name the host that was allowed."""
    parser = HelloParser()
    try:
        hello = parser.feed(bytes(whole)) if whole else None
        async with asyncio.timeout(HEAD_S if whole else FIRST_BYTE_S):
            while hello is None:
                data = await guest.read(HEAD_S)
                if not data:
                    raise Refused("not_tls", "it closed before it said for whom it is", attempt.rule)
                whole += data
                hello = parser.feed(data)
    except NotTls as bad:
        raise Refused("not_tls", f"only TLS may be spoken here ({bad})", attempt.rule) from bad
    except TimeoutError:
        raise Refused("timed_out", "no TLS hello came in time", attempt.rule) from None
    _check_name(gate, attempt, hello)


def _check_name(gate: Gate, attempt: Attempt, hello: Hello) -> None:
    target = attempt.at()
    if hello.ech and gate.services.organisation().ech == "refuse":
        raise Refused("ech_refused", "encrypted client hello is not allowed here", attempt.rule)
    if hello.sni is None:
        if target.address is not None:
            return  # the rule names this address: there is no name to agree with
        raise Refused("sni_missing", f"the TLS hello does not name {target.host}", attempt.rule)
    if hello.sni != target.host:
        raise Refused("sni_mismatch", f"the TLS hello names another host than {target.host}", attempt.rule)
