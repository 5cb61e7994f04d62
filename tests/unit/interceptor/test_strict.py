"""What is refused of a request's form: as a pure judgement and through the real process, where no byte reaches a server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.interceptor import strict
from cloche_server.interceptor.binding import Target
from tests.unit.interceptor.conftest import World
from tests.unit.interceptor.gate import ALLOWED, wait_until
from tests.unit.interceptor.talk import Talk, request, say

# What is sent, and the code of the denial.
ROWS: dict[str, tuple[bytes, str]] = {
    "CL and TE": (
        request(
            "POST", "/", "Transfer-Encoding: chunked", "Content-Length: 4", body=b"0\r\n\r\nGET /x HTTP/1.1\r\n\r\n"
        ),
        "smuggling",
    ),
    "two CL": (request("POST", "/", "Content-Length: 3", body=b"abcd"), "smuggling"),
    "CL with a sign": (b"POST / HTTP/1.1\r\nHost: api.test\r\nContent-Length: +3\r\n\r\nabc", "smuggling"),
    "CL as a list": (b"POST / HTTP/1.1\r\nHost: api.test\r\nContent-Length: 3, 3\r\n\r\nabc", "smuggling"),
    "unknown TE": (request("POST", "/", "Transfer-Encoding: xchunked", body=b"0\r\n\r\n"), "smuggling"),
    "gzip and chunked": (request("POST", "/", "Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"), "smuggling"),
    "two TE": (
        request("POST", "/", "Transfer-Encoding: chunked", "Transfer-Encoding: identity", body=b"0\r\n\r\n"),
        "smuggling",
    ),
    "TE in HTTP/1.0": (
        b"POST / HTTP/1.0\r\nHost: api.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "smuggling",
    ),
    "a space before the colon": (request("POST", "/", "Content-Length : 3", body=b""), "smuggling"),
    "a header in two lines": (request("GET", "/", "X-A: b\r\n c: d"), "smuggling"),
    "a bare LF": (b"GET / HTTP/1.1\nHost: api.test\r\n\r\n", "smuggling"),
    "a bare LF in a header": (b"GET / HTTP/1.1\r\nHost: api.test\r\nX: a\nY: b\r\n\r\n", "smuggling"),
    "a bare CR": (request("GET", "/", "X-A: b\rc"), "smuggling"),
    "a NUL": (request("GET", "/", "X-A: b\0c"), "smuggling"),
    "a control character": (request("GET", "/", "X-A: b\x01c"), "smuggling"),
    "two Hosts": (request("GET", "/", "Host: api.test"), "authority_mismatch"),
    "two Hosts that differ": (request("GET", "/", "Host: other.test"), "authority_mismatch"),
    "no Host": (b"GET / HTTP/1.1\r\nX: y\r\n\r\n", "authority_mismatch"),
    "another Host": (request("GET", "/", host="other.test"), "authority_mismatch"),
    "another Host's port": (request("GET", "/", host="api.test:8443"), "authority_mismatch"),
    "userinfo in Host": (request("GET", "/", host="api.test@other.test"), "authority_mismatch"),
    "absolute form to another host": (request("GET", "https://other.test/"), "authority_mismatch"),
    "absolute form": (request("GET", "https://api.test/"), "authority_mismatch"),
    "CONNECT inside": (b"CONNECT other.test:443 HTTP/1.1\r\nHost: api.test\r\n\r\n", "connect_inside"),
    "HTTP/2.7": (b"GET / HTTP/2.7\r\nHost: api.test\r\n\r\n", "http_version"),
    "HTTP/0.9": (b"GET /\r\n\r\n", "bad_request_line"),
    "PRI": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "http_version"),
    "a method in small letters": (request("get"), "bad_method"),
    "two other methods": (request("POST", "/", "X-HTTP-Method: PUT", "X-Method-Override: DELETE"), "smuggling"),
    "another method that is none": (request("POST", "/", "X-HTTP-Method: DELETE, PUT"), "smuggling"),
    "a dot segment": (request("GET", "/a/../b"), "bad_path"),
    "an encoded dot segment": (request("GET", "/a/%2e%2E/b"), "bad_path"),
    "a dot segment encoded twice": (request("GET", "/a/%252e%252e/b"), "bad_path"),
    "a dot segment with a parameter": (request("GET", "/a/..;x=1/b"), "bad_path"),
    "a back slash": (request("GET", "/a/..\\b"), "bad_path"),
    "a fragment": (request("GET", "/a#b"), "bad_path"),
    "a long path": (request("GET", "/" + "a" * 9000), "path_too_long"),
    "a very long path": (request("GET", "/" + "\xe9" * 30_000), "path_too_long"),
    "a long method": (request("A" * 60_000), "bad_method"),
    "many headers": (request("GET", "/", *(f"X-{n}: y" for n in range(300))), "head_too_large"),
    "a long head": (request("GET", "/", "X-A: " + "b" * 70_000), "head_too_large"),
}


@pytest.mark.req("NET-5")
@pytest.mark.parametrize("row", ROWS)
def test_a_request_that_can_be_read_in_two_ways_reaches_nobody(world: World, row: str) -> None:
    data, code = ROWS[row]
    before = len(world.http1.seen)
    reply = say(world, data)
    assert 400 <= reply.status <= 505, reply.raw
    assert b"x-cloche-denied: " + code.encode() in reply.head.lower()
    assert world.gate.denial(reply.connection)["code"] == code
    assert not world.gate.of("request", reply.connection)
    assert len(world.http1.seen) == before


@pytest.mark.req("NET-5")
def test_a_smuggled_second_request_is_judged_as_a_request(world: World) -> None:
    """Behind a right first one in the same bytes: it is asked for, or refused, like any other."""
    talk = Talk(world)
    talk.send(request("GET", "/first") + request("GET", "/second", host="other.test"))
    reply = talk.reply(until_end=True)
    assert reply.raw.count(b"HTTP/1.1 200") == 1
    assert reply.raw.count(b"HTTP/1.1 421") == 1
    assert [asked["path"] for asked in world.gate.of("request", talk.connection)] == ["/first"]


@pytest.mark.req("NET-5")
def test_another_method_in_a_header_is_asked_for_too(world: World) -> None:
    denied = {"allow": False, "status": 403, "code": "method_not_allowed", "text": "no DELETE", "rule": "r"}
    before, world.gate.verdict = world.gate.verdict, lambda asked: denied if asked["method"] == "DELETE" else ALLOWED
    try:
        seen = len(world.http1.seen)
        for name in ("X-HTTP-Method-Override", "x-http-method", "X-Method-Override"):
            reply = say(world, request("POST", "/", f"{name}: delete", body=b"x"))
            assert reply.status == 403
            assert [asked["method"] for asked in world.gate.of("request", reply.connection)] == ["POST", "DELETE"]
        assert len(world.http1.seen) == seen
        assert say(world, request("POST", "/", "X-HTTP-Method-Override: PATCH", body=b"x")).status == 200
    finally:
        world.gate.verdict = before


def test_a_request_with_trailers_in_http1_is_refused_and_told_why(world: World) -> None:
    """It was sent as it came, so the server has seen a part of it, and never its end."""
    whole = len(world.http1.seen)
    sent = request("POST", "/", "Transfer-Encoding: chunked") + b"3\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\n"
    talk = Talk(world)
    talk.send(sent)
    reply = talk.reply(until_end=True)
    assert (reply.status, b"trailers behind the body" in reply.body) == (400, True)
    assert world.gate.denial(talk.connection)["code"] == "trailers"
    assert len(world.http1.seen) == whole


def test_an_upgrade_to_something_else_is_left_out(world: World) -> None:
    reply = say(
        world, request("GET", "/", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAA")
    )
    assert reply.status == 200
    assert b"pgrade" not in world.http1.seen[-1].head
    assert b"HTTP2" not in world.http1.seen[-1].head


@pytest.mark.req("NET-5")
@pytest.mark.timeout(60)
def test_what_comes_too_slowly_ends(world: World) -> None:
    """A head, a second head on a connection that was used before, and a handshake."""
    head, second = Talk(world), Talk(world)
    head.send(b"GET / HTTP/1.1\r\nHost: api.test\r\n")
    assert second.say(request("GET", "/")).status == 200
    second.send(b"G")
    client, handshake = world.gate.open("api.test")
    client.sendall(b"\x16\x03\x01")
    assert head.reply(until_end=True).raw == b""
    assert second.reply(until_end=True).raw == b""
    assert client.recv(100) == b""
    assert world.gate.denial(head.connection)["code"] == "head_too_slow"
    assert world.gate.denial(second.connection)["code"] == "head_too_slow"
    assert world.gate.denial(handshake)["code"] == "handshake_too_slow"


def test_endless_headers_end(world: World) -> None:
    talk = Talk(world)
    sent = 0
    try:
        talk.send(b"GET / HTTP/1.1\r\nHost: api.test\r\n")
        while sent < 100 << 20:
            talk.send(b"X-A: " + b"b" * 10_000 + b"\r\n")
            sent += 10_000
    except OSError:
        pass  # closed by the other side: what was wanted
    assert sent < 10 << 20
    assert world.gate.denial(talk.connection)["code"] == "head_too_large"
    assert world.gate.peak_bytes() <= 100_000_000


def test_endless_headers_of_a_server_end(world: World) -> None:
    def endless() -> list[bytes]:
        return [b"HTTP/1.1 200 OK\r\n", *([b"X-A: " + b"b" * 10_000 + b"\r\n"] * 3000)]

    world.http1.answers[b"/endless"] = endless()
    reply = say(world, request("GET", "/endless"))
    assert reply.status in (0, 502)
    assert b"X-A" not in reply.raw
    assert world.gate.peak_bytes() <= 100_000_000


def _sent_until_it_stops(talk: Talk, size: int) -> int:
    sent = 0
    try:
        while sent < size:
            sent += talk.socket.send(bytes(16_384))
    except TimeoutError:
        pass  # nobody takes more: what is wanted
    return sent


def test_a_request_body_waits_outside_while_the_verdict_does(world: World) -> None:
    """Approvals can take minutes; an upload must not fill memory meanwhile."""
    go: list[bool] = []

    def slow(asked: dict[str, object]) -> dict[str, object]:
        wait_until(lambda: go, "the test")
        return {"allow": True, "status": 200, "code": "allowed", "text": "", "rule": "r"}

    before, world.gate.verdict = world.gate.verdict, slow
    talk = Talk(world)
    try:
        size = 40 << 20
        talk.send(request("POST", "/size", f"Content-Length: {size}"))
        wait_until(lambda: world.gate.of("request", talk.connection), "the question")
        talk.socket.settimeout(1)
        sent = _sent_until_it_stops(talk, size)
        assert sent < 8 << 20
        go.append(True)
        talk.socket.settimeout(20)
        while sent < size:
            sent += talk.socket.send(bytes(min(16_384, size - sent)))
        assert talk.reply().status == 200
    finally:
        go.append(True)
        world.gate.verdict = before
    assert world.gate.peak_bytes() <= 100_000_000


HOST = Target("api.test", 443, tls=True)


@given(st.binary(max_size=300))
def test_no_head_that_is_let_through_has_a_bare_line_end(data: bytes) -> None:
    head = b"GET / HTTP/1.1\r\nX: " + data + b"\r\n\r\n"
    if strict.raw_head(head) is None:
        first = head.partition(b"\r\n\r\n")[0]
        assert b"\n" not in first.replace(b"\r\n", b"")
        assert b"\r" not in first.replace(b"\r\n", b"")
        assert b"\0" not in first


def test_addresses_and_ports_in_host() -> None:
    def asked(host: bytes, target: Target) -> str | None:
        fields = ((b"Host", host),)
        found = strict.request(strict.Asked("HTTP/1.1", b"GET", b"", b"", b"/", fields), target)
        return None if found is None else found.code

    six = Target("2001:db8::1", 8443, tls=True)
    assert asked(b"[2001:db8::1]:8443", six) is None
    assert asked(b"2001:db8::1", six) == "authority_mismatch"
    assert asked(b"API.test", HOST) is None
    assert asked(b"api.test:443", HOST) is None
    assert asked(b"api.test.", HOST) == "authority_mismatch"
    assert asked(b"api.test", Target("api.test", 8443, tls=True)) == "authority_mismatch"
    assert asked(b"api.test", Target("api.test", 80, tls=False)) is None
