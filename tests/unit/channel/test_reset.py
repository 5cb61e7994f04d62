import contextlib
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.channel.errors import ProtocolError
from cloche_server.channel.frames import FRAME_BYTES_MAX, Decoder, Kind, encode
from cloche_server.channel.reset import SCAN_TRIES_MAX, Scan, State, check_state, reset_bytes, resume_bytes

NONCE = bytes(range(16))
STREAM = {
    "op": "exec", "command": "c1", "opened": True, "sent": 100, "acked": 40, "received": 7,
    "eof_sent": False, "eof_received": True, "ended": False,
}  # fmt: skip
STATE = {"streams": {"2": STREAM, "4": {**STREAM, "op": "exec.stderr"}}, "highest_host": 4, "highest_guest": 0}


def state_frame(state: object = STATE, nonce: bytes = NONCE) -> bytes:
    return encode(Kind.STATE, 0, nonce + json.dumps(state).encode())


def scanned(*pieces: bytes) -> tuple[State | None, bytes]:
    scan = Scan(NONCE)
    for index, piece in enumerate(pieces):
        state = scan.feed(piece)
        if state is not None:
            return state, scan.rest + b"".join(pieces[index + 1 :])
    return None, b""


@pytest.mark.req("LIF-6")
def test_reset_completes_any_half_frame_and_is_then_found() -> None:
    sent = reset_bytes(NONCE)
    assert len(sent) == FRAME_BYTES_MAX + 13 + 16
    assert [(k, s, bytes(p)) for k, s, p in Decoder().feed(sent)] == [(Kind.RESET, 0, NONCE)]


@pytest.mark.req("LIF-6")
@given(st.binary(max_size=500), st.binary(max_size=50), st.data())
def test_state_is_found_behind_any_garbage_at_any_split(before: bytes, after: bytes, data: st.DataObject) -> None:
    raw = before + state_frame() + after
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    state, rest = scanned(*pieces)
    assert state is not None
    assert list(state.streams) == [2, 4]
    assert rest == after


@pytest.mark.req("LIF-6")
def test_state_behind_half_a_maximum_frame_and_a_foreign_state() -> None:
    torn = encode(Kind.DATA, 2, random.Random(1).randbytes(131_072))[70_000:]
    foreign = state_frame(nonce=b"another nonce 16")
    state, _ = scanned(torn, foreign, b"\x0e\0\0\0\0" + NONCE, state_frame())
    assert state is not None


@pytest.mark.req("ISO-7")
def test_endless_garbage_ends_the_search() -> None:
    scan = Scan(NONCE, bytes_max=1 << 20)
    for _ in range(15):
        assert scan.feed(bytes(65_536)) is None
        assert len(scan._kept) < FRAME_BYTES_MAX
    with pytest.raises(ProtocolError) as caught:
        scan.feed(bytes(65_536))
    assert caught.value.reason == "unresponsive"


@pytest.mark.req("ISO-7")
def test_a_guest_that_repeats_the_nonce_costs_few_checksums() -> None:
    fake = bytes((Kind.STATE, 0, 0, 0, 0)) + (25).to_bytes(4, "little") + NONCE
    scan = Scan(NONCE)
    with pytest.raises(ProtocolError, match="too many"):
        scan.feed(fake * (SCAN_TRIES_MAX * 3))
    with pytest.raises(ProtocolError, match="too many"):
        Scan(NONCE).feed(NONCE * (SCAN_TRIES_MAX * 3))


@pytest.mark.req("ISO-7")
@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("sent", -1), ("sent", True), ("sent", 1.0), ("sent", "1"), ("sent", 2**63), ("acked", 101), ("sent", 40 + (1 << 20) + 1),
        ("received", None), ("op", 5), ("op", "x" * 65), ("command", 5), ("command", ""), ("opened", 1), ("ended", "no"),
    ],
)  # fmt: skip
def test_a_lying_stream_state(where: str, value: object) -> None:
    with pytest.raises(ProtocolError):
        check_state({**STATE, "streams": {"2": {**STREAM, where: value}}})


@pytest.mark.req("ISO-7")
@pytest.mark.parametrize(
    "change",
    [
        {"streams": []}, {"streams": {"02": STREAM}}, {"streams": {"": STREAM}}, {"streams": {"-2": STREAM}}, {"streams": {"0": STREAM}},
        {"streams": {"٢": STREAM}}, {"streams": {"6": STREAM}}, {"streams": {"1": STREAM}}, {"streams": {"99999999999": STREAM}},
        {"streams": {"2": 5}}, {"highest_host": 3}, {"highest_guest": 2}, {"highest_host": 2**32}, {"highest_host": None},
        {"streams": {str(n): STREAM for n in range(2, 2100, 2)}, "highest_host": 4000},
    ],
    ids=range(15),
)  # fmt: skip
def test_a_lying_state(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        check_state({**STATE, **change})


@pytest.mark.req("LIF-6")
def test_resume_names_what_is_kept_and_closes_the_rest() -> None:
    state = check_state(dict(STATE))
    ((kind, stream, payload),) = [(k, s, bytes(p)) for k, s, p in Decoder().feed(resume_bytes(NONCE, state, {2: 60}))]
    assert (kind, stream, payload[:16]) == (Kind.RESUME, 0, NONCE)
    assert json.loads(payload[16:]) == {"streams": {"2": {"logged": 60}}, "close": [4]}


@pytest.mark.parametrize("logged", [{2: 39}, {2: 101}, {6: 0}, {1: 50}])
def test_offsets_outside_what_the_guest_kept_are_refused(logged: dict[int, int]) -> None:
    with pytest.raises(ProtocolError):
        resume_bytes(NONCE, check_state(dict(STATE)), logged)


@pytest.mark.req("ISO-7")
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda c: st.lists(c, max_size=3) | st.dictionaries(st.sampled_from(["streams", "2", "sent", "acked", "op", "highest_host"]), c, max_size=4), max_leaves=12))  # fmt: skip
def test_any_state_raises_nothing_but_protocol_error(state: object) -> None:
    with contextlib.suppress(ProtocolError):
        scanned(state_frame(state))
