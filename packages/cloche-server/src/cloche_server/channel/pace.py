"""How much of the loop one channel may use, as arithmetic on times that the pump measured.

Two things are free, because the host itself bounds them: the time that useful data bytes account for (credit), and a
fixed time for each frame that the host gave cause for (`Mux.receive` counts it as useful bytes too).
What is left (tiny frames, padding, refused opens, pings) is drawn from a bucket that refills at a share of real time;
an empty bucket means a pause. So a guest that sends millions of frames gets `share` of the loop, in few short turns,
and a loop of small commands is not paused for its own answers.
"""

from __future__ import annotations

LOOP_SHARE = 0.03
"""A flood at 0.1 % cost a neighbour about as much as one at this share: the rest is the guest's own use of the CPU."""
BURST_S = 0.010
"""Some hundreds of frames at once after a rest (pongs to our own pings, a few lines of output) are no flood."""
TURN_S = 0.000_5
"""A turn also costs a wake-up and a write, which nobody is charged for: so not shorter than those."""
SECONDS_PER_USEFUL_BYTE = 1 / 400_000_000
ANSWER_BYTES = 200_000
"""0.5 ms: what END, the dearest of OPENED, EOF and END, takes here (its record is written)."""
FIRST_DATA_BYTES = 800_000
"""2 ms: a stream's first byte makes the files of its log, which took 1.0 to 2.2 ms here."""

EXCHANGE_BYTES = 20_000
"""50 µs: a small request on a connection that is kept, which comes after the answer to the one before."""


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
