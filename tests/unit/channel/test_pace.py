import pytest

from cloche_server.channel.outbox import Outbox
from cloche_server.channel.pace import BURST_S, LOOP_SHARE, TURN_S, Pace, turn_is_over


@pytest.mark.req("EXE-3")
def test_a_flood_gets_its_share_of_the_loop_and_no_more() -> None:
    now, busy = 0.0, 0.0
    pace = Pace(now)
    while now < 10:
        now += TURN_S
        busy += TURN_S
        now += pace.charge(now, TURN_S, 0)
    assert busy / now == pytest.approx(LOOP_SHARE, rel=0.05)


def test_useful_bytes_are_free() -> None:
    pace = Pace(0.0)
    for step in range(10_000):
        assert pace.charge(step * 0.000_5, 0.000_5, 1 << 20) == 0.0


def test_a_burst_is_not_paused() -> None:
    pace = Pace(0.0)
    assert pace.charge(0.0, BURST_S * 0.9, 0) == 0.0
    assert pace.charge(0.0, BURST_S * 0.2, 0) > 0.0


def test_a_turn_is_longer_when_it_moves_bytes() -> None:
    assert turn_is_over(TURN_S * 2, 0)
    assert not turn_is_over(TURN_S * 2, 1 << 20)


def test_the_outbox_joins_small_frames_and_survives_partial_writes() -> None:
    wakes: list[int] = []
    box = Outbox(lambda: wakes.append(1))
    big = bytes(range(256)) * 400
    for index in range(50):
        box.put(4, index, b"small")
    box.put(4, 2, big)
    box.put(4, 2, b"small")
    whole = b"".join(bytes(part) for part in box.iovecs(1 << 30))
    assert len(box.iovecs(1 << 30)) == 3, "small frames, the payload by reference, small frames"
    assert any(part is big for part in box.iovecs(1 << 30))
    assert wakes == [1]
    out = b""
    for step in range(1, 10_000):
        if not box.bytes:
            break
        part = b"".join(bytes(piece) for piece in box.iovecs(1000))[:step]
        out += part
        box.written(len(part))
    assert out == whole
