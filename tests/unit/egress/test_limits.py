"""Limits as arithmetic: no clock, no socket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.wire.egress import EgressLimits
from cloche_server.egress.limits import Attempts, Bytes, Limits

pytestmark = pytest.mark.req("NET-8")


@given(
    per_s=st.floats(0.5, 1000),
    gaps=st.lists(st.floats(0, 2), min_size=1, max_size=200),
)
def test_no_pattern_of_attempts_gets_more_than_the_rate_and_one_burst(per_s: float, gaps: list[float]) -> None:
    bucket, now, taken = Attempts(per_s, 0.0), 0.0, 0
    for gap in gaps:
        now += gap
        while bucket.take(now):
            taken += 1
    assert taken <= max(1.0, per_s) + per_s * now + 1e-6 * (taken + 1)


def test_attempts_at_the_rate_are_never_refused() -> None:
    bucket = Attempts(50, 0.0)
    assert all(bucket.take(at / 50) for at in range(1, 5000))


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = Attempts(1, 100.0)
    assert bucket.take(100.0)
    assert not bucket.take(50.0)
    assert not bucket.take(100.9)
    assert bucket.take(101.1)


@given(
    per_s=st.integers(1024, 10_000_000),
    pieces=st.lists(st.integers(1, 262_144), min_size=20, max_size=200),
)
def test_bytes_hold_their_rate_whatever_the_pieces(per_s: int, pieces: list[int]) -> None:
    """Who waits as told moves, over all, the rate: never more, and less only by the first piece's freedom."""
    limit, now = Bytes(per_s, None, 0.0), 0.0
    for piece in pieces:
        now += limit.pay(piece, now)
    moved = sum(pieces)
    assert moved <= per_s * now * 1.0001 + per_s * 0.06 + 1
    assert moved >= per_s * now * 0.9999 - 1


@given(shares=st.lists(st.integers(1, 5), min_size=2, max_size=8), per_s=st.integers(100_000, 5_000_000))
def test_connections_share_one_rate(shares: list[int], per_s: int) -> None:
    limit, now, moved = Bytes(per_s, None, 0.0), 0.0, 0
    for _ in range(20):
        waits = []
        for share in shares:
            moved += share * 10_000
            waits.append(limit.pay(share * 10_000, now))
        now += max(waits)
    assert moved <= per_s * now + per_s * 0.06 + 1


def test_a_slow_rate_moves_small_pieces() -> None:
    assert Bytes(2048, None, 0.0).piece == 1024
    assert Bytes(1_000_000, None, 0.0).piece == 50_000
    assert Bytes(None, 5, 0.0).piece == 262_144


def test_the_total_ends_everything() -> None:
    limit = Bytes(None, 1000, 0.0)
    assert limit.bounded
    assert limit.count(999)
    assert not limit.used_up
    assert not limit.count(1)
    assert limit.used_up
    assert not limit.count(1)
    assert limit.pay(10**9, 0.0) == 0.0, "a total is no rate"


def test_connections_are_given_back() -> None:
    limits = Limits(EgressLimits(connections=2), 0.0)
    assert limits.take_connection()
    assert limits.take_connection()
    assert not limits.take_connection()
    limits.give_connection()
    assert limits.take_connection()
    with pytest.raises(AssertionError):
        Limits(EgressLimits(), 0.0).give_connection()
