"""How much of the loop one channel may use, as arithmetic on times that the pump measured.

Time that useful data bytes account for is free: credit already bounds those. What is left (tiny frames, padding,
refused opens, pings) is drawn from a bucket that refills at a share of real time; an empty bucket means a pause.
So a guest that sends millions of frames gets `share` of the loop, in turns too short for a neighbour to notice.
"""

from __future__ import annotations

LOOP_SHARE = 0.08
"""Above what an honest loop of small commands needs (some 3 % here): below that, it would be the one that is paused."""
BURST_S = 0.010
TURN_S = 0.000_15
SECONDS_PER_USEFUL_BYTE = 1 / 400_000_000


class Pace:
    """One channel's bucket."""

    __slots__ = ("_at", "_left_s", "share")

    def __init__(self, now: float, *, share: float = LOOP_SHARE) -> None:
        self.share = share
        self._at = now
        self._left_s = BURST_S

    def charge(self, now: float, spent_s: float, useful_bytes: int) -> float:
        """Account for one turn; the pause in seconds before the next, 0.0 for none."""
        excess = max(0.0, spent_s - useful_bytes * SECONDS_PER_USEFUL_BYTE)
        self._left_s = min(BURST_S, self._left_s + (now - self._at) * self.share) - excess
        self._at = now
        if self._left_s >= 0:
            return 0.0
        return (TURN_S - self._left_s) / self.share


def turn_is_over(spent_s: float, useful_bytes: int) -> bool:
    return spent_s - useful_bytes * SECONDS_PER_USEFUL_BYTE > TURN_S
