"""One more connection, if the sandbox may have one."""

from __future__ import annotations

from cloche_server.egress.attempt import Attempt, Refused


async def step(attempt: Attempt) -> None:
    limits = attempt.gate.limits
    if limits.bytes.used_up:
        raise Refused("bytes_used_up", f"this sandbox has used all of its {limits.bytes.total_max} bytes", attempt.rule)
    if not attempt.slot_held:
        if not limits.take_connection():
            text = f"this sandbox has as many connections open as it may have ({limits.connections_max})"
            raise Refused("too_many_connections", text, attempt.rule)
        attempt.slot_held = True
