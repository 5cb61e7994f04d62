"""What the interceptor may say, to the byte."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.egress.interception.messages import (
    MESSAGE_BYTES_MAX,
    Alert,
    Closed,
    Denied,
    Dial,
    Frames,
    Lie,
    Ready,
    Request,
    Response,
    parse,
    told,
)

pytestmark = [pytest.mark.req("NET-9")]
WHOLE = [
    ({"t": "ready"}, Ready()),
    ({"t": "dial", "dial": 1, "conn": 2}, Dial(1, 2)),
    ({"t": "request", "ask": 1, "conn": 2, "method": "GET", "path": "/a", "bytes": 7}, Request(1, 2, "GET", "/a")),
    ({"t": "response", "ask": 1, "status": 200}, Response(1, 200)),
    ({"t": "alert", "conn": 2, "kind": "secret_in_request", "where": "body", "secret": "T"}, Alert(2, "secret_in_request", "body", "T")),
    ({"t": "denied", "conn": 2, "ask": None, "code": "smuggling", "text": "no", "method": None, "path": None}, Denied(2, "smuggling", "no")),
    ({"t": "closed", "conn": 2}, Closed(2)),
]  # fmt: skip


@pytest.mark.parametrize(("said", "meant"), WHOLE)
def test_each_message(said: dict[str, object], meant: object) -> None:
    assert parse(json.dumps(said).encode()) == meant


@pytest.mark.parametrize(
    "said",
    [
        b"", b"[]", b"null", b"{}", b'{"t":"ready"', b'{"t":1}', b'{"t":"exec"}', b'"\xff"', b"[" * 100_000,
        b'{"t":"dial","dial":0,"conn":1}', b'{"t":"dial","dial":-1,"conn":1}', b'{"t":"dial","dial":1.5,"conn":1}',
        b'{"t":"dial","dial":true,"conn":1}', b'{"t":"dial","dial":9007199254740993,"conn":1}', b'{"t":"dial","dial":1}',
        b'{"t":"request","ask":1,"conn":1,"method":"G T","path":"/"}',
        b'{"t":"request","ask":1,"conn":1,"method":"GET\\n","path":"/"}',
        b'{"t":"request","ask":1,"conn":1,"method":"' + b"A" * 33 + b'","path":"/"}',
        b'{"t":"request","ask":1,"conn":1,"method":"GET","path":"/' + b"a" * 8192 + b'"}',
        b'{"t":"response","ask":1,"status":99}',
        b'{"t":"alert","conn":1,"kind":"all_is_well"}',
        b'{"t":"denied","conn":1,"code":"UP"}', b'{"t":"denied","conn":1,"code":"x","text":"' + b"a" * 1001 + b'"}',
    ],
)  # fmt: skip
def test_everything_else_is_a_lie(said: bytes) -> None:
    with pytest.raises(Lie):
        parse(said)


@given(st.lists(st.sampled_from(WHOLE), max_size=8), st.data())
def test_cut_anywhere_it_is_the_same(messages: list[tuple[dict[str, object], object]], data: st.DataObject) -> None:
    stream = b"".join(told(said) for said, _ in messages)
    frames, heard = Frames(), []
    while stream:
        count = data.draw(st.integers(1, len(stream)))
        heard += list(frames.feed(stream[:count]))
        stream = stream[count:]
    assert heard == [meant for _, meant in messages]


@given(st.binary(max_size=400))
def test_any_bytes_are_a_message_or_a_lie(data: bytes) -> None:
    try:
        list(Frames().feed(data))
    except Lie:
        return


def test_a_length_beyond_the_limit_is_refused_before_the_bytes_come() -> None:
    with pytest.raises(Lie):
        list(Frames().feed((MESSAGE_BYTES_MAX + 1).to_bytes(4, "little")))


def test_what_it_is_told_has_a_limit_too() -> None:
    with pytest.raises(ValueError, match="bytes"):
        told({"t": "trust", "pem": "x" * (1 << 20)})
    assert msgspec.json.decode(told({"t": "forget", "id": "s"})[4:]) == {"t": "forget", "id": "s"}
