"""What one sandbox may use of the way out, as arithmetic on times that the caller gives. Pure."""

from __future__ import annotations

from cloche.wire.egress import EgressLimits

BURST_S = 1.0
"""Attempts that were not made within this time can be made at once."""
BYTES_BURST_S = 0.05
PIECE_BYTES_MIN = 1024
PIECE_BYTES_MAX = 262_144


class Attempts:
    """A bucket: `per_s` new attempts a second, as many at once after a rest."""

    __slots__ = ("_at", "_left", "_size", "per_s")

    def __init__(self, per_s: float, now: float) -> None:
        self.per_s = per_s
        self._size = max(1.0, per_s * BURST_S)
        self._left = self._size
        self._at = now

    def take(self, now: float) -> bool:
        self._left = min(self._size, self._left + max(0.0, now - self._at) * self.per_s)
        self._at = max(self._at, now)
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def next_s(self) -> float:
        """After a `take` in vain: until there is one again."""
        return (1.0 - self._left) / self.per_s


class Bytes:
    """Bytes of all connections of a sandbox. What was moved is counted at once and paid for, piece by piece, after."""

    __slots__ = ("_at", "_debt", "per_s", "piece", "total_max", "used")

    def __init__(self, per_s: int | None, total_max: int | None, now: float) -> None:
        self.per_s = per_s
        self.total_max = total_max
        self.used = 0
        self.piece = PIECE_BYTES_MAX
        """The most that is moved at one time: smaller pieces keep a slow rate even."""
        if per_s is not None:
            self.piece = int(min(PIECE_BYTES_MAX, max(PIECE_BYTES_MIN, per_s * BYTES_BURST_S)))
        self._debt = 0.0
        self._at = now

    @property
    def bounded(self) -> bool:
        return self.per_s is not None or self.total_max is not None

    @property
    def used_up(self) -> bool:
        return self.total_max is not None and self.used >= self.total_max

    def count(self, count: int) -> bool:
        """They were moved; False when nothing is left for ever."""
        self.used += count
        return not self.used_up

    def pay(self, count: int, now: float) -> float:
        """How many seconds to wait, after these, before the next."""
        if self.per_s is None:
            return 0.0
        self._debt += count
        return self.wait_s(now)

    def wait_s(self, now: float) -> float:
        if self.per_s is None:
            return 0.0
        self._debt = max(-self.per_s * BYTES_BURST_S, self._debt - max(0.0, now - self._at) * self.per_s)
        self._at = max(self._at, now)
        return max(0.0, self._debt / self.per_s)


class Limits:
    """All limits of one gate, and what is used."""

    __slots__ = ("attempts", "bytes", "connections", "connections_max")

    def __init__(self, limits: EgressLimits, now: float, *, bytes_used: int = 0) -> None:
        self.connections_max = limits.connections
        self.connections = 0
        self.attempts = Attempts(limits.attempts_per_s, now)
        self.bytes = Bytes(limits.bytes_per_s, limits.bytes_total, now)
        self.bytes.used = bytes_used

    def take_connection(self) -> bool:
        if self.connections >= self.connections_max:
            return False
        self.connections += 1
        return True

    def give_connection(self) -> None:
        assert self.connections > 0, "more connections given back than taken"
        self.connections -= 1
