"""SOCKS 5: greeting, login, request, in any pieces; and what is no name."""

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.egress.socks import Answer, BadSocks, Connect, SocksReader, reply
from cloche_server.policy.model import Target

HELLO = b"\x05\x01\x00"


def by_name(name: bytes, port: int = 443) -> bytes:
    return b"\x05\x01\x00\x03" + bytes([len(name)]) + name + port.to_bytes(2)


def taken(data: bytes, size: int | None = None) -> tuple[list[Answer | Connect], bytes]:
    reader = SocksReader()
    events = []
    for at in range(0, len(data), size or len(data) or 1):
        reader.feed(data[at : at + (size or len(data))])
        while (event := reader.next_event()) is not None:
            events.append(event)
    return events, reader.rest


@pytest.mark.req("NET-5")
@pytest.mark.parametrize(
    ("request_", "target"),
    [
        (by_name(b"Db.Example.com.", 5432), Target("db.example.com", 5432)),
        (by_name(b"1.2.3.4"), Target("1.2.3.4", 443, ip_address("1.2.3.4"))),
        (by_name(b"2606:4700::1"), Target("2606:4700::1", 443, ip_address("2606:4700::1"))),
        (b"\x05\x01\x00\x01\x01\x02\x03\x04\x00\x50", Target("1.2.3.4", 80, ip_address("1.2.3.4"))),
        (
            b"\x05\x01\x00\x04" + ip_address("2606:4700::1").packed + b"\x01\xbb",
            Target("2606:4700::1", 443, ip_address("2606:4700::1")),
        ),
    ],
)
@pytest.mark.parametrize("size", [None, 1, 3])
def test_connect(request_: bytes, target: Target, size: int | None) -> None:
    events, rest = taken(HELLO + request_ + b"data", size)
    assert events == [Answer(b"\x05\x00"), Connect(target)]
    assert rest == b"data"


def test_a_login_is_read_and_forgotten() -> None:
    login = b"\x01\x04user\x06secret"
    events, rest = taken(b"\x05\x01\x02" + login + by_name(b"a.example"))
    assert events == [Answer(b"\x05\x02"), Answer(b"\x01\x00"), Connect(Target("a.example", 443))]
    assert rest == b""
    assert taken(b"\x05\x02\x02\x00" + by_name(b"a.example"))[0][0] == Answer(b"\x05\x00")
    assert taken(b"\x05\x01\x02\x01\x00\x00")[0][-1] == Answer(b"\x01\x00")


@pytest.mark.req("NET-3")
@pytest.mark.req("NET-5")
@pytest.mark.parametrize(
    ("data", "reason", "answer"),
    [
        (b"\x04\x01\x00\x50", "version", b""),
        (b"GET / HTTP/1.1", "version", b""),
        (b"\x05\x01\x01", "method", b"\x05\xff"),
        (b"\x05\x00", "method", b"\x05\xff"),
        (b"\x05\x01\x02\x05", "login", b""),
        (HELLO + b"\x04", "version", reply(1)),
        (HELLO + b"\x05\x02\x00\x01\x01", "command", reply(7)),
        (HELLO + b"\x05\x03\x00\x01\x01", "command", reply(7)),
        (HELLO + b"\x05\x01\x01\x01\x01", "reserved", reply(1)),
        (HELLO + b"\x05\x01\x00\x02\x01", "address_kind", reply(8)),
        (HELLO + by_name(b""), "bad_host", reply(2)),
        (HELLO + by_name(b"evil.com\0.allowed.com"), "bad_host", reply(2)),
        (HELLO + by_name(b"allowed.com\r\n"), "bad_host", reply(2)),
        (HELLO + by_name(b"allowed.com\n"), "bad_host", reply(2)),
        (HELLO + by_name(b"allowed%2ecom"), "bad_host", reply(2)),
        (HELLO + by_name("ällowed.com".encode()), "bad_host", reply(2)),
        (HELLO + by_name("аllowed.com".encode()), "bad_host", reply(2)),
        (HELLO + by_name(b"b\xfccher.example"), "bad_host", reply(2)),
        (HELLO + by_name(b"allowed.com@evil.com"), "bad_host", reply(2)),
        (HELLO + by_name(b"allowed.com:443"), "bad_host", reply(2)),
        (HELLO + by_name(b"a" * 255), "bad_host", reply(2)),
        (HELLO + by_name(b"2852039166"), "bad_host", reply(2)),
        (HELLO + by_name(b"0xA9FEA9FE"), "bad_host", reply(2)),
        (HELLO + by_name(b"0251.0376.0251.0376"), "bad_host", reply(2)),
        (HELLO + by_name(b"fe80::1%eth0"), "bad_host", reply(2)),
        (HELLO + by_name(b"allowed.com", 0), "bad_port", reply(2)),
    ],
)
def test_refused(data: bytes, reason: str, answer: bytes) -> None:
    for size in (None, 1):
        with pytest.raises(BadSocks) as refused:
            taken(data, size)
        assert refused.value.reason == reason
        assert refused.value.answer == answer


def test_replies() -> None:
    assert reply(0) == b"\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00"
    assert reply(2)[1] == 2


@given(st.binary(max_size=600), st.integers(1, 20), st.sampled_from([b"", HELLO, HELLO + b"\x05\x01\x00\x03"]))
def test_any_bytes_in_any_pieces(data: bytes, size: int, start: bytes) -> None:
    outcomes: list[object] = []
    for pieces in (None, size):
        try:
            outcomes.append(taken(start + data, pieces))
        except BadSocks as refused:
            outcomes.append(refused.reason)
    assert outcomes[0] == outcomes[1]
