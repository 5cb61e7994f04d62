import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.channel.credit import WINDOW_BYTES_MAX, WINDOWS_BYTES_PER_SANDBOX_MAX, Budget, Inbound
from cloche_server.channel.errors import ChannelFull, ProtocolError, WrongGeneration
from cloche_server.channel.frames import Kind
from cloche_server.channel.pace import FIRST_DATA_BYTES
from cloche_server.channel.reset import StreamState
from cloche_server.channel.streams import STREAMS_PER_OPENER_MAX, Flow
from tests.unit.channel.transcript import HELLO, Ear, Talk

KIB = 1024


def opened(talk: Talk, ear: Ear | None = None) -> Flow:
    (flow,) = talk.mux.open("file.read", {"path": "/x"}, [ear or Ear()])
    talk.host()
    return flow


def breaks(talk: Talk, reason: str, kind: str, stream: int, payload: object = b"") -> None:
    with pytest.raises(ProtocolError) as caught:
        talk.guest(kind, stream, payload)  # type: ignore[arg-type]
    assert caught.value.reason == reason


@pytest.mark.req("EXE-1")
def test_a_command_from_open_to_confirm() -> None:
    talk, out, err = Talk(), Ear(), Ear()
    flow, stderr = talk.mux.open("exec", {"argv": ["true"], "stderr_stream": 4}, [out, err])
    assert talk.host() == ['OPEN 2 {"op": "exec", "argv": ["true"], "stderr_stream": 4}']
    talk.guest("OPENED", 2, {"pid": 7})
    talk.mux.send(flow, b"in")
    talk.mux.send_eof(flow)
    assert talk.host() == ["DATA 2 2", "EOF 2 2"]
    assert talk.guest("DATA", 2, b"out") == 3 + FIRST_DATA_BYTES
    assert talk.guest("DATA", 4, b"wrong") == 5 + FIRST_DATA_BYTES
    talk.credit(2, 2, 65_538)
    talk.eof(4, 5)
    talk.eof(2, 3)
    talk.guest("END", 2, {"ok": {"code": 0}})
    assert out.heard == ['opened {"pid": 7}', "data 3", "credit 2 65538", "eof 3", 'end {"ok": {"code": 0}}']
    assert err.heard == ["data 5", "eof 5", 'end {"ok": {"code": 0}}']
    assert talk.host() == []
    talk.mux.confirm(flow)
    assert talk.host() == ["CONFIRM 2"]
    assert talk.mux.flows == {}
    assert talk.node.bytes_used == 0
    assert stderr.parent is flow
    assert talk.mux.next_stream_id() == 6


def test_a_refusal_is_end_without_opened() -> None:
    talk, ear = Talk(), Ear()
    flow = opened(talk, ear)
    talk.guest("END", 2, {"error": {"code": "not_found", "message": "no"}})
    talk.mux.confirm(flow)
    assert ear.heard == ['end {"error": {"code": "not_found", "message": "no"}}']


@pytest.mark.req("EXE-3")
def test_sending_stops_at_the_limit_and_goes_on_with_credit() -> None:
    talk = Talk()
    flow = opened(talk)
    talk.mux.send(flow, bytes(100 * KIB))
    talk.mux.send_eof(flow)
    assert talk.host() == ["DATA 2 65536"]
    assert flow.outbound.pending_bytes == 100 * KIB - 65_536
    talk.credit(2, 1000, 66_536)
    assert talk.host() == ["DATA 2 1000"]
    talk.credit(2, 66_536, 66_536 + 300_000)
    assert talk.host() == ["DATA 2 35864", "EOF 2 102400"]


@pytest.mark.req("EXE-3")
def test_a_window_grows_only_while_drained_and_never_past_its_maximum() -> None:
    talk = Talk()
    flow = opened(talk)
    for _ in range(40):
        while flow.inbound.received < flow.inbound.limit:
            talk.guest("DATA", 2, bytes(min(32 * KIB, flow.inbound.limit - flow.inbound.received)))
        talk.mux.consumed(flow, flow.inbound.received)
        assert flow.inbound.limit - flow.inbound.consumed <= WINDOW_BYTES_MAX
    assert flow.inbound.window == WINDOW_BYTES_MAX
    other = opened(talk)
    for _ in range(40):  # always one byte behind: never drained
        talk.guest("DATA", 4, bytes(min(32 * KIB, other.inbound.limit - other.inbound.received)))
        talk.mux.consumed(other, other.inbound.received - 1)
    assert other.inbound.window == 64 * KIB


@pytest.mark.req("EXE-3")
def test_windows_of_a_sandbox_and_of_the_node_are_bounded() -> None:
    talk = Talk(node=Budget(12 << 20), guest_open=lambda *_: Ear())
    flows = [opened(talk) for _ in range(40)]
    for _ in range(8):
        for flow in flows:
            room = flow.inbound.limit - flow.inbound.received
            for _ in range(room // (64 * KIB)):
                talk.guest("DATA", flow.id, bytes(64 * KIB))
            talk.mux.consumed(flow, flow.inbound.received)
        assert talk.mux.budget.bytes_used <= WINDOWS_BYTES_PER_SANDBOX_MAX // 2
    assert talk.node.bytes_used > 7 << 20
    talk.guest("OPEN", 1, {"op": "connect"})
    assert 1 in talk.mux.flows, "windows that grew leave room for one that begins"
    neighbour = Talk(node=talk.node)
    flow = opened(neighbour)
    for _ in range(10):
        while flow.inbound.received < flow.inbound.limit:
            neighbour.guest("DATA", flow.id, bytes(64 * KIB))
        neighbour.mux.consumed(flow, flow.inbound.received)
    assert talk.node.bytes_used <= 12 << 20
    talk.mux.lost("gone")
    neighbour.mux.lost("gone")
    assert talk.node.bytes_used == 0


@pytest.mark.req("EXE-3")
def test_data_beyond_the_limit_is_a_protocol_error() -> None:
    talk = Talk()
    opened(talk)
    talk.guest("DATA", 2, bytes(65_536))
    breaks(talk, "beyond_limit", "DATA", 2, b"x")


@pytest.mark.parametrize(("offset", "reason"), [(4, "eof_offset"), (2, "eof_offset"), (2**64 - 1, "eof_offset")])
def test_eof_must_be_at_what_was_sent(offset: int, reason: str) -> None:
    talk = Talk()
    opened(talk)
    talk.guest("DATA", 2, b"abc")
    breaks(talk, reason, "EOF", 2, offset.to_bytes(8, "little"))


def test_nothing_follows_eof() -> None:
    talk = Talk()
    opened(talk)
    talk.eof(2, 0)
    breaks(talk, "data_after_eof", "DATA", 2, b"x")
    breaks(talk, "eof_twice", "EOF", 2, bytes(8))


@pytest.mark.parametrize(
    ("consumed", "limit", "reason"),
    [
        (0, 65_535, "credit_went_back"),
        (9, 65_536, "credit_went_back"),
        (11, 70_000, "credit_beyond_sent"),
        (10, 10 + WINDOW_BYTES_MAX + 1, "credit_window"),
        (10, 2**64 - 1, "credit_window"),
    ],
)
def test_lying_credit_is_a_protocol_error(consumed: int, limit: int, reason: str) -> None:
    talk = Talk()
    flow = opened(talk)
    talk.mux.send(flow, bytes(10))
    talk.credit(2, 10, 65_536)
    breaks(talk, reason, "CREDIT", 2, consumed.to_bytes(8, "little") + limit.to_bytes(8, "little"))


@pytest.mark.parametrize(
    ("kind", "payload"),
    [("OPENED", {}), ("END", {"ok": {}}), ("DATA", b"x"), ("CONFIRM", b""), ("TELL", {}), ("EOF", bytes(8)), ("CREDIT", bytes(16))],
)  # fmt: skip
@pytest.mark.parametrize("stream", [0, 1, 8])
def test_a_frame_on_a_stream_that_was_never_open(kind: str, payload: object, stream: int) -> None:
    talk = Talk()
    opened(talk)
    breaks(talk, "unexpected_frame", kind, stream, payload)


@pytest.mark.parametrize("kind", ["RESET", "STATE", "RESUME"])
def test_a_guest_does_not_reset_the_host(kind: str) -> None:
    breaks(Talk(), "unexpected_frame", kind, 0, bytes(16))


@pytest.mark.parametrize(("kind", "payload"), [("CONFIRM", b""), ("ABORT", {}), ("TELL", {}), ("OPEN", {"op": "x"})])
def test_an_acceptor_does_not_play_the_opener(kind: str, payload: object) -> None:
    talk = Talk()
    opened(talk)
    with pytest.raises(ProtocolError):
        talk.guest(kind, 2, payload)  # type: ignore[arg-type]


def test_late_frames_of_a_confirmed_stream_are_dropped_and_end_is_not() -> None:
    talk, ear = Talk(), Ear()
    flow = opened(talk, ear)
    talk.guest("END", 2, {"ok": {}})
    talk.credit(2, 0, 65_536)  # it crossed nothing, but it does no harm
    breaks(talk, "data_after_end", "DATA", 2, b"x")
    breaks(talk, "unexpected_frame", "END", 2, {"ok": {}})
    talk.mux.confirm(flow)
    assert talk.guest("DATA", 2, b"x") == 0, "dropped bytes are not useful"
    talk.eof(2, 99)
    talk.credit(2, 9, 9)
    breaks(talk, "unexpected_frame", "END", 2, {"ok": {}})
    assert ear.heard == ['end {"ok": {}}']


def test_opened_comes_once() -> None:
    talk = Talk()
    opened(talk)
    talk.guest("OPENED", 2, {})
    breaks(talk, "unexpected_frame", "OPENED", 2, {})


def test_a_stderr_stream_has_only_data_and_eof() -> None:
    talk = Talk()
    talk.mux.open("exec", {"stderr_stream": 4}, [Ear(), Ear()])
    for kind, payload in (("OPENED", {}), ("END", {"ok": {}}), ("CREDIT", bytes(16))):
        breaks(talk, "unexpected_frame", kind, 4, payload)


@pytest.mark.parametrize(
    "result",
    [{}, {"ok": {}, "error": {}}, {"ok": 1}, {"error": "x"}, {"error": {"code": 5, "message": ""}}, {"error": {"code": "io", "message": 5}}],
)  # fmt: skip
def test_a_malformed_end(result: dict[str, object]) -> None:
    talk = Talk()
    opened(talk)
    breaks(talk, "message", "END", 2, result)


def test_an_unknown_error_code_is_told_as_io_and_long_text_is_cut() -> None:
    talk, ear = Talk(), Ear()
    opened(talk, ear)
    talk.guest("END", 2, {"error": {"code": "weird", "message": "m" * 9000}})
    error = json.loads(ear.heard[0][4:])["error"]
    assert (error["code"], len(error["message"])) == ("io", 4096)


def test_hello_comes_first_and_once() -> None:
    said: list[object] = []
    breaks(Talk(on_hello=said.append), "hello_missing", "PING", 0)
    talk = Talk(on_hello=said.append)
    talk.guest("HELLO", 0, HELLO)
    assert said == [HELLO]
    breaks(talk, "hello_again", "HELLO", 0, HELLO)
    breaks(Talk(), "hello_again", "HELLO", 0, HELLO)


@pytest.mark.parametrize(
    "change", [{"gen": "1"}, {"gen": True}, {"boot": "x"}, {"ops": 1}, {"ops": [1]}, {"ops": ["a"] * 65}, {"agent": ""}]
)
def test_a_malformed_hello(change: dict[str, object]) -> None:
    breaks(Talk(on_hello=print), "message", "HELLO", 0, {**HELLO, **change})


@pytest.mark.parametrize(("gen", "reason"), [(0, "guest_too_old"), (2, "guest_too_new")])
def test_another_generation_is_named(gen: int, reason: str) -> None:
    with pytest.raises(WrongGeneration) as caught:
        Talk(on_hello=print).guest("HELLO", 0, {"gen": gen})
    assert caught.value.reason == reason


def test_ping_and_pong() -> None:
    ponged: list[bytes] = []
    talk = Talk(on_pong=ponged.append)
    talk.guest("PING", 0, b"abc")
    talk.mux.ping(b"x")
    assert talk.host() == ["PONG 0 616263", "PING 0 78"]
    talk.guest("PONG", 0, b"x")
    assert ponged == [b"x"]
    breaks(talk, "ping", "PING", 0, bytes(65))
    breaks(talk, "pong", "PONG", 0, bytes(65))


def test_the_host_opens_at_most_the_streams_of_the_contract() -> None:
    talk = Talk()
    for _ in range(STREAMS_PER_OPENER_MAX):
        opened(talk)
    with pytest.raises(ChannelFull):
        opened(talk)


# --- adopted streams, and the end -------------------------------------------------------------


def state(**changes: object) -> StreamState:
    values = {"op": "exec", "command": "c", "opened": True, "sent": 900, "acked": 500, "received": 70, "eof_sent": False, "eof_received": False, "ended": False}  # fmt: skip
    return StreamState(**{**values, **changes})  # type: ignore[arg-type]


def test_an_adopted_stream_goes_on_at_its_offsets() -> None:
    talk, ear = Talk(), Ear()
    talk.mux.highest_host = 8
    flow = talk.mux.adopt(6, state(), 700, ear)
    assert talk.host() == ["CREDIT 6 700 66236"]
    talk.mux.send(flow, b"abc")
    assert talk.host() == [], "nothing is sent before the guest's fresh CREDIT"
    talk.credit(6, 70, 200)
    assert talk.host() == ["DATA 6 3"]
    talk.guest("DATA", 6, bytes(128 * KIB))  # the predecessor's limit may have been one full window past the log
    assert flow.inbound.received == 700 + 128 * KIB
    talk.guest("OPENED", 6, {"pid": 1})
    talk.eof(6, 700 + 128 * KIB)
    talk.guest("END", 6, {"ok": {}})
    talk.mux.confirm(flow)
    assert talk.node.bytes_used == 0


def test_an_adopted_stderr_ends_with_its_command() -> None:
    talk, out, err = Talk(), Ear(), Ear()
    talk.mux.highest_host = 8
    flow = talk.mux.adopt(6, state(), 700, out)
    talk.mux.adopt(8, state(op="exec.stderr"), 500, err)
    talk.guest("END", 6, {"ok": {}})
    assert err.heard == out.heard == ['end {"ok": {}}']
    talk.mux.confirm(flow)
    assert talk.mux.flows == {}


def test_a_lost_channel_tells_every_sink_once() -> None:
    talk, ear = Talk(), Ear()
    opened(talk, ear)
    talk.mux.lost("closed_by_guest")
    talk.mux.lost("again")
    assert ear.heard == ["lost closed_by_guest"]


KINDS = st.sampled_from([kind.name for kind in Kind])
PAYLOADS = st.binary(max_size=40) | st.sampled_from(
    [
        b"{}",
        b'{"op":"x"}',
        b'{"ok":{}}',
        bytes(8),
        bytes(16),
        (5).to_bytes(8, "little") + (65_541).to_bytes(8, "little"),
    ]
)


@pytest.mark.req("ISO-7")
@given(st.lists(st.tuples(KINDS, st.integers(0, 9), PAYLOADS), max_size=30))
def test_any_frames_raise_nothing_but_protocol_error(plan: list[tuple[str, int, bytes]]) -> None:
    talk = Talk(guest_open=lambda *_: Ear())
    talk.mux.open("exec", {}, [Ear(), Ear()])
    opened(talk)
    for kind, stream, payload in plan:
        try:
            talk.guest(kind, stream, payload)
        except ProtocolError:
            break
    talk.mux.lost("over")
    assert talk.node.bytes_used == 0


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 100)), max_size=60))
def test_credit_never_goes_back_and_is_enough(steps: list[tuple[int, int]]) -> None:
    budget = Budget(1 << 20)
    budget.take_always(65_536)
    inbound = Inbound(budget)
    limit = inbound.limit
    for size, percent in steps:
        inbound.take(min(size, inbound.limit - inbound.received))
        granted = inbound.consume(inbound.consumed + (inbound.received - inbound.consumed) * percent // 100)
        if granted is not None:
            assert granted[1] >= limit
            limit = granted[1]
        assert inbound.limit - inbound.consumed <= WINDOW_BYTES_MAX
        if inbound.consumed == inbound.received:
            assert inbound.limit > inbound.received, "a drained stream can always go on"
