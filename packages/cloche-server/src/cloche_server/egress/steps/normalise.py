"""A name as the guest wrote it becomes a target in its one normal form, or is refused."""

from __future__ import annotations

from cloche_server.egress.attempt import Attempt, Refused
from cloche_server.policy.names import BadName, target


async def step(attempt: Attempt) -> None:
    placeholders = attempt.gate.placeholders()
    if placeholders is not None:
        secret = placeholders.found(attempt.host.encode("utf-8", "surrogatepass"))
        if secret is not None:
            attempt.host = "(a placeholder)"
            attempt.gate.alert(attempt, "placeholder_elsewhere", "the name of a host", secret)
            raise Refused("placeholder_elsewhere", f"the placeholder of {secret} stands in the name of a host")
    try:
        attempt.target = target(attempt.host, attempt.port)
    except BadName as bad:
        raise Refused("bad_name", f"this is not a name or address that can be reached ({bad.reason})") from bad
    attempt.host, attempt.port = attempt.target.host, attempt.target.port
