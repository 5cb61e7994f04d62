"""The host asks for the name's addresses; an address stands for itself. An approved one must still be among them."""

from __future__ import annotations

from cloche_server.egress.attempt import Attempt, Refused
from cloche_server.egress.services import Unresolved


async def step(attempt: Attempt) -> None:
    target = attempt.at()
    services = attempt.gate.services
    known = attempt.fixed or target.address or services.organisation().hosts.get(target.host)
    if known is not None:
        attempt.addresses = (known,)
        return
    try:
        attempt.addresses = await services.resolver.addresses(target.host)
    except Unresolved as bad:
        raise Refused("unresolved", f"{target.host}: {bad}", attempt.rule) from bad
    if attempt.shown is None:
        return
    if attempt.shown not in attempt.addresses:
        raise Refused("target_changed", f"{target.host} no longer has the address that was approved", attempt.rule)
    attempt.addresses = (attempt.shown,)
