"""A program inside asks for a name. No query leaves: the answer is on which ports the name could be reached, or none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from cloche_server.channel import JsonObject, Stream
from cloche_server.egress.attempt import Attempt, Refused
from cloche_server.policy.names import BadName, normal_host

if TYPE_CHECKING:
    from cloche_server.egress.gate import Gate

AGAIN_S: Final = 60.0
NAMES_KEPT_MAX: Final = 1024
PORTS_MAX: Final = 64


def answer(gate: Gate, stream: Stream, fields: JsonObject) -> None:
    name = fields.get("name")
    if not isinstance(name, str) or len(name) > 253:
        stream.refuse("invalid", "no name")
        return
    try:
        ports = _ports(gate, name)
    except Refused as refused:
        _record(gate, name, refused)
        ports = ()
    stream.end({"ok": {"ports": list(ports[:PORTS_MAX])}})


def _ports(gate: Gate, name: str) -> tuple[int, ...]:
    placeholders = gate.placeholders()
    secret = None if placeholders is None else placeholders.found(name.encode("utf-8", "surrogatepass"))
    if secret is not None:
        gate.take_attempt()
        gate.alert(
            Attempt(gate, "(a placeholder)", 0, 0, gate.command_in(0)), "placeholder_elsewhere", "a name", secret
        )
        raise Refused("placeholder_elsewhere", f"the placeholder of {secret} stands in a name")
    try:
        host, address = normal_host(name)
    except BadName as bad:
        raise Refused("bad_name", f"this is not a name that can be looked up ({bad.reason})") from bad
    ports = () if address is not None else gate.policy.resolvable(host)
    if not ports:
        raise Refused("no_rule", f"No rule allows any port of {host}: the name was not looked up.")
    return ports


def _record(gate: Gate, name: str, refused: Refused) -> None:
    """The same name from the same command at most once a minute; a flood of names counts as attempts."""
    now = asyncio.get_running_loop().time()
    known, asked = gate.names_refused, (name, gate.command_in(0))
    if known.get(asked, 0.0) > now or refused.code == "rate_limited":
        return
    if len(known) >= NAMES_KEPT_MAX:
        known.clear()
    known[asked] = now + AGAIN_S
    try:
        gate.take_attempt()
    except Refused:
        return
    hidden = refused.code == "placeholder_elsewhere"
    gate.record_denied(Attempt(gate, "(a placeholder)" if hidden else name, 0, 0, gate.command_in(0)), refused)
