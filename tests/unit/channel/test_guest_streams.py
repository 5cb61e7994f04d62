"""Streams that the guest opens: refused unless the owner takes them, and bounded either way."""

import pytest

from cloche_server.channel.credit import WINDOWS_BYTES_PER_SANDBOX_MAX
from cloche_server.channel.errors import ProtocolError
from cloche_server.channel.streams import Sink
from tests.unit.channel.transcript import Ear, Talk

REFUSED = '{"error": {"code": "refused", "message": "this sandbox may not open that"}}'


def test_a_guests_stream_is_refused_by_default_and_leaves_nothing() -> None:
    talk = Talk()
    for stream in range(1, 20_001, 2):
        talk.guest("OPEN", stream, {"op": "connect"})
        talk.guest("CONFIRM", stream)
    assert talk.host()[-1] == f"END 19999 {REFUSED}"
    assert talk.mux.flows == {}
    assert talk.node.bytes_used == 0


@pytest.mark.parametrize(("stream", "reason"), [(2, "stream_id"), (0, "stream_id"), (1, "stream_id"), (3, "stream_id")])
def test_a_guest_opens_odd_ids_upwards(stream: int, reason: str) -> None:
    talk = Talk()
    talk.guest("OPEN", 3, {"op": "connect"})
    with pytest.raises(ProtocolError, match=reason):
        talk.guest("OPEN", stream, {"op": "connect"})


def test_accept_later_with_the_bytes_that_came_before() -> None:
    offers: list[tuple[int, str]] = []
    owner, sink = Ear(), Ear()

    def offer(stream: int, op: str, fields: dict[str, object]) -> Sink:
        offers.append((stream, op))
        return owner

    talk = Talk(guest_open=offer)
    talk.guest("OPEN", 5, {"op": "connect", "host": "x"})
    assert offers == [(5, "connect")]
    talk.guest("DATA", 5, b"early")
    flow = talk.mux.flows[5]
    talk.mux.accept(flow, {}, sink)
    talk.guest("DATA", 5, b"late")
    talk.eof(5, 9)
    assert sink.heard == ["data 5", "data 4", "eof 9"]
    talk.mux.end(flow, {"ok": {}})
    assert talk.host() == ["OPENED 5 {}", 'END 5 {"ok": {}}']
    talk.guest("CONFIRM", 5)
    talk.guest("DATA", 5, b"crossed")
    assert talk.mux.flows == {}
    assert owner.heard == []


def test_a_guest_that_gives_up_is_answered() -> None:
    owner = Ear()
    talk = Talk(guest_open=lambda *_: owner)
    talk.guest("OPEN", 1, {"op": "connect"})
    talk.guest("ABORT", 1, {"reason": "bored"})
    assert owner.heard == ["lost aborted"]
    assert talk.host() == ['END 1 {"error": {"code": "aborted", "message": "the opener gave up"}}']
    assert talk.node.bytes_used == 0


def test_a_guests_streams_are_bounded_in_number_and_window() -> None:
    talk = Talk(guest_open=lambda *_: Ear())
    for stream in range(1, 4001, 2):
        talk.guest("OPEN", stream, {"op": "connect"})
    assert len(talk.mux.flows) == WINDOWS_BYTES_PER_SANDBOX_MAX // 65_536
    assert len(talk.host()) == 2000 - len(talk.mux.flows)
    talk.guest("DATA", 1, bytes(65_536))
    with pytest.raises(ProtocolError, match="beyond_limit"):
        talk.guest("DATA", 1, b"x")
