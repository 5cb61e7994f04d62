"""Every address of the answer is judged; one that is refused refuses them all (NET-4)."""

from __future__ import annotations

from cloche_server.egress.attempt import Attempt, Refused
from cloche_server.policy.addresses import refusal
from cloche_server.policy.model import Address, Effect


async def step(attempt: Attempt) -> None:
    for address in attempt.addresses:
        _check(attempt, address)


def _check(attempt: Attempt, address: Address) -> None:
    target = attempt.at()
    denied = attempt.policy.address(address, target.port)
    if denied is not None and denied.effect is Effect.DENY:
        raise Refused(denied.code, denied.text, denied.rule)
    services = attempt.gate.services
    kind = refusal(address, services.own_addresses())
    if kind is None or services.organisation().excepts(address, target.port):
        return
    raise Refused(
        "address_refused", f"{target.host} has the address {address}, which is refused ({kind})", attempt.rule
    )
