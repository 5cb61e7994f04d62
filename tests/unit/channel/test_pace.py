import pytest

from cloche_server.channel.frames import encode_credit, encode_offset
from cloche_server.channel.outbox import Outbox
from cloche_server.channel.pace import (
    ANSWER_BYTES,
    BURST_S,
    EXCHANGE_BYTES,
    FIRST_DATA_BYTES,
    LOOP_SHARE,
    TURN_S,
    Pace,
    turn_is_over,
)
from cloche_server.channel.reset import StreamState
from tests.unit.channel.transcript import Ear, Talk


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


def test_a_loop_of_small_commands_is_not_paused() -> None:
    pace = Pace(0.0)
    for step in range(1000):  # OPENED, DATA, EOF twice and END in one turn, as measured; a command takes 10 ms
        assert pace.charge(step * 0.010, 0.002_9, 4 * ANSWER_BYTES + FIRST_DATA_BYTES) == 0.0


def test_a_guest_gets_no_more_free_frames_than_the_host_asked_for() -> None:
    talk = Talk(guest_open=lambda stream, op, fields: Ear())
    talk.mux.open("exec", {}, [Ear(), Ear()])
    assert talk.guest("OPENED", 2, {}) == ANSWER_BYTES
    for stream in (2, 4):
        assert talk.guest("DATA", stream) == 0
        assert talk.guest("DATA", stream, b"a") == 1 + FIRST_DATA_BYTES
        assert talk.guest("DATA", stream, b"b") == 1
        assert talk.guest("EOF", stream, encode_offset(2)) == ANSWER_BYTES
    assert talk.guest("END", 2, {"ok": {}}) == ANSWER_BYTES
    assert talk.guest("PING", 0, b"12345678") == 0
    assert talk.guest("OPEN", 1, {"op": "connect"}) == 0
    assert talk.guest("DATA", 1, b"a") == 1
    assert talk.guest("EOF", 1, encode_offset(1)) == 0


def test_data_after_an_answer_of_ours_is_worth_an_exchange_once() -> None:
    talk = Talk(guest_open=lambda stream, op, fields: Ear())
    talk.guest("OPEN", 1, {"op": "connect"})
    flow = talk.mux.flows[1]
    talk.mux.accept(flow, {}, Ear())
    assert talk.guest("DATA", 1, b"first request") == 13
    for _ in range(3):
        talk.mux.send(flow, b"answer")
        assert talk.guest("DATA", 1, b"next") == 4 + EXCHANGE_BYTES
        assert talk.guest("DATA", 1, b"more") == 4


def test_credit_is_worth_what_it_confirms_and_no_more() -> None:
    talk = Talk(guest_open=lambda stream, op, fields: Ear())
    talk.guest("OPEN", 1, {"op": "connect"})
    flow = talk.mux.flows[1]
    talk.mux.accept(flow, {}, Ear())
    assert talk.guest("CREDIT", 1, encode_credit(0, 1 << 20)) == 0
    talk.mux.send(flow, bytes(100_000))
    assert talk.guest("CREDIT", 1, encode_credit(100_000, 1 << 20)) == 100_000
    assert talk.guest("CREDIT", 1, encode_credit(100_000, 1 << 20)) == 0


def test_an_adopted_stream_may_be_opened_again_and_again_but_not_for_free() -> None:
    talk = Talk()
    talk.mux.highest_host = 2
    state = StreamState("exec", None, False, 0, 0, 0, eof_sent=False, eof_received=False, ended=False)
    talk.mux.adopt(2, state, 0, Ear())
    assert [talk.guest("OPENED", 2, {}) for _ in range(3)] == [0, 0, 0]


def test_a_burst_is_not_paused() -> None:
    pace = Pace(0.0)
    assert pace.charge(0.0, BURST_S * 0.9, 0) == 0.0
    assert pace.charge(0.0, BURST_S * 0.2, 0) > 0.0


def test_a_turn_is_longer_when_it_moves_bytes() -> None:
    assert turn_is_over(TURN_S * 2, 0)
    assert not turn_is_over(TURN_S * 2, 1 << 20)


def test_a_frame_that_nobody_waits_for_wakes_nobody_at_once() -> None:
    wakes: list[str] = []
    box = Outbox(lambda: wakes.append("now"), lambda: wakes.append("later"))
    box.put_later(8, 2)
    box.put_later(8, 4)
    assert wakes == ["later"]
    box.put(2, 6, b"{}")
    box.put(2, 8, b"{}")
    assert wakes == ["later", "now"], "what somebody waits for takes it along"
    assert len(box.iovecs(1 << 30)) == 1
    box.written(box.bytes)
    box.put(2, 10, b"{}")
    box.put_later(8, 10)
    assert wakes == ["later", "now", "now"]


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
