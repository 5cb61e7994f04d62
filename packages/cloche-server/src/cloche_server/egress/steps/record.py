"""What is about to happen is written down before it does (NET-6)."""

from __future__ import annotations

from cloche_server.egress.attempt import Attempt


async def step(attempt: Attempt) -> None:
    attempt.gate.record_allowed(attempt)
    attempt.recorded = True
