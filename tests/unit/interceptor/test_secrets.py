"""Secrets through the real process: put in where they belong, blocked and told everywhere else, kept out of answers."""

from __future__ import annotations

import base64
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from tests.unit.interceptor.conftest import World
from tests.unit.interceptor.gate import Message, secret, wait_until
from tests.unit.interceptor.servers import Seen, plain
from tests.unit.interceptor.talk import Reply, Talk, request, say

REAL = 'real"value/of+the~token 1'
BODY_REAL = "client-secret/with+signs"
TOKEN = secret("TOKEN", REAL, "api.test")
PH = str(TOKEN["placeholder"])
IN_BODY = secret("IN_BODY", BODY_REAL, "api.test", places=[{"kind": "body", "name": None, "format": "{}"}])
BODY_PH = str(IN_BODY["placeholder"])
REQUIRED = secret("REQUIRED", "the-only-right-credential", "other.test", require=True)
IN_QUERY = secret("IN_QUERY", "query value&", "api.test", places=[{"kind": "query", "name": "key", "format": "{}"}])


@pytest.fixture(autouse=True)
def _sandbox(world: World) -> Iterator[None]:
    world.gate.sandbox("s2", TOKEN, IN_BODY, REQUIRED, IN_QUERY)
    return


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def chunks_of(text: bytes, *headers: str) -> bytes:
    return request("POST", "/", "Transfer-Encoding: chunked", *headers) + chunked(text)


LONG = b"some text " * 20_000
ELSEWHERE: dict[str, bytes] = {
    "another header": request("GET", "/", f"X-Other: {PH}"),
    "the right header in another form": request("GET", "/", f"Authorization: Token {PH}"),
    "the path": request("GET", f"/{PH}/x"),
    "the path, percent": request("GET", "/" + "".join(f"%{ord(char):02X}" for char in PH)),
    "the query": request("GET", f"/?key={PH}"),
    "the query, base64": request("GET", "/?a=" + quote(base64.b64encode(b"x" + PH.encode()).decode())),
    "a header, hex": request("GET", "/", f"X-A: {PH.encode().hex()}"),
    "a header, base64": request("GET", "/", f"X-A: {base64.b64encode(PH.encode()).decode()}"),
    "a header's name": request("GET", "/", f"{PH}: x"),
    "Basic": request("GET", "/", f"Authorization: Basic {base64.b64encode(f'u:{PH}'.encode()).decode()}"),
    "a small body": request("POST", "/", body=f'{{"a": "{PH}"}}'.encode()),
    "a small body, base64": request("POST", "/", body=base64.b64encode(b"zz" + PH.encode())),
    "a small body, JSON escapes": request("POST", "/", body="".join(f"\\u{ord(char):04x}" for char in PH).encode()),
    "a large body": request("POST", "/", body=LONG + PH.encode() + LONG),
    "a body, split over chunks": request("POST", "/", "Transfer-Encoding: chunked")
    + chunked(LONG, PH[:10].encode(), PH[10:20].encode(), PH[20:].encode(), LONG),
    "a gzip body": request("POST", "/", "Content-Encoding: gzip", body=gzip.compress(LONG + PH.encode())),
    "a deflate body": request("POST", "/", "Content-Encoding: deflate", body=zlib.compress(PH.encode())),
    "a gzip body in chunks": chunks_of(gzip.compress(PH.encode() + LONG), "Content-Encoding: gzip"),
}


def _blocked(world: World, reply: Reply, kind: str, name: str) -> Message:
    assert reply.status == 403, reply.raw[:300]
    assert b"x-cloche-denied: " + kind.encode() in reply.head.lower()
    assert world.gate.denial(reply.connection)["code"] == kind
    (alert,) = world.gate.of("alert", reply.connection)
    assert (alert["kind"], alert["secret"]) == (kind, name)
    return alert


@pytest.mark.req("SEC-3")
@pytest.mark.parametrize("row", ELSEWHERE)
def test_a_placeholder_elsewhere_is_blocked_and_told(world: World, row: str) -> None:
    before = len(world.http1.seen)
    reply = say(world, ELSEWHERE[row], sandbox="s2")
    alert = _blocked(world, reply, "placeholder_elsewhere", "TOKEN")
    assert alert["where"]
    assert len(world.http1.seen) == before
    assert PH.encode() not in world.http1.raw
    assert REAL.encode() not in world.http1.raw


@pytest.mark.req("SEC-3")
def test_a_placeholder_to_another_host_is_blocked(world: World) -> None:
    sent = request("GET", "/", f"Authorization: Bearer {PH}", host="other.test")
    _blocked(world, say(world, sent, "other.test", sandbox="s2"), "placeholder_elsewhere", "TOKEN")


@pytest.mark.req("SEC-3")
@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip"])
def test_a_body_that_cannot_be_looked_at_is_refused(world: World, coding: str) -> None:
    reply = say(world, request("POST", "/", f"Content-Encoding: {coding}", body=b"x" * 100), sandbox="s2")
    assert reply.status == 415
    assert world.gate.denial(reply.connection)["code"] == "encoded_body"
    assert say(world, request("POST", "/", f"Content-Encoding: {coding}", body=b"x"), sandbox="s1").status == 200


def test_an_encoded_body_without_placeholders_passes(world: World) -> None:
    sent = gzip.compress(LONG)
    assert say(world, request("POST", "/", "Content-Encoding: gzip", body=sent), sandbox="s2").status == 200
    assert world.http1.seen[-1].body == sent
    reply = say(world, request("POST", "/", "Content-Encoding: gzip", body=sent[:-20]), sandbox="s2")
    assert reply.status == 400


@pytest.mark.req("SEC-3")
def test_another_credential_is_refused_where_one_is_required(world: World) -> None:
    sent = request("GET", "/", "Authorization: Bearer sk-my-own", host="other.test")
    _blocked(world, say(world, sent, "other.test", sandbox="s2"), "foreign_credential", "REQUIRED")
    right = request("GET", "/", f"Authorization: Bearer {REQUIRED['placeholder']}", host="other.test")
    assert say(world, right, "other.test", sandbox="s2").status == 200
    assert world.http1.seen[-1].header("authorization") == b"Bearer the-only-right-credential"


@pytest.mark.req("SEC-1")
def test_a_real_value_that_got_inside_is_not_sent(world: World) -> None:
    _blocked(world, say(world, request("GET", "/", f"X: {REAL}"), sandbox="s2"), "secret_in_request", "TOKEN")


@pytest.mark.req("SEC-2")
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_body_gets_its_value(world: World, large: bool, framing: str) -> None:
    around = LONG.decode() if large else "a"
    text = json.dumps({"before": around, "secret": BODY_PH, "after": around}).encode()
    if framing == "length":
        sent = request("POST", "/", "Content-Type: application/json", body=text)
    else:
        pieces = [text[at : at + 1000] for at in range(0, len(text), 1000)]
        sent = request("POST", "/", "Content-Type: application/json", "Transfer-Encoding: chunked") + chunked(*pieces)
    reply = say(world, sent, sandbox="s2")
    assert reply.status == 200
    assert json.loads(world.http1.seen[-1].body)["secret"] == BODY_REAL
    assert json.loads(world.http1.seen[-1].body)["after"] == around
    assert BODY_REAL.encode() not in reply.raw


@pytest.mark.req("SEC-2")
def test_a_query_gets_its_value(world: World) -> None:
    reply = say(world, request("GET", f"/q?a=1&key={IN_QUERY['placeholder']}"), sandbox="s2")
    assert world.http1.seen[-1].line == b"GET /q?a=1&key=query%20value%26 HTTP/1.1"
    assert b"query%20value" not in reply.raw
    (asked,) = world.gate.of("request", reply.connection)
    assert asked["path"] == "/q"


def _with_real(seen: Seen) -> bytes:
    return (seen.header("authorization") or b"").removeprefix(b"Bearer ")


ECHOES = {
    "raw": lambda real: real,
    "base64": base64.b64encode,
    "base64, behind one byte": lambda real: base64.b64encode(b"u" + real),
    "base64, behind two bytes": lambda real: base64.b64encode(b"u:" + real),
    "base64 for URLs": base64.urlsafe_b64encode,
    "percent": lambda real: quote(real, safe="").encode(),
    "JSON": lambda real: json.dumps(real.decode()).encode(),
    "hex": lambda real: real.hex().encode(),
}


def _cores(real: bytes) -> list[bytes]:
    return [echo(real)[4:-6] for echo in ECHOES.values()]


@pytest.mark.req("SEC-3")
@pytest.mark.parametrize("how", ECHOES)
@pytest.mark.parametrize("split", [None, 1, 7])
def test_an_echoed_value_does_not_come_back(world: World, how: str, split: int | None) -> None:
    def answer(seen: Seen) -> bytes:
        body = b"before " + ECHOES[how](_with_real(seen)) + b" after"
        if split is None:
            return plain(body)
        pieces = [body[at : at + split] for at in range(0, len(body), split)]
        return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(*pieces)

    world.http1.answers[b"/echo"] = answer
    reply = say(world, request("GET", "/echo", f"Authorization: Bearer {PH}"), sandbox="s2")
    assert reply.status == 200
    assert b"before" in reply.raw.replace(b"\r\n1\r\n", b"") or split == 7 or b"b\r\n" in reply.raw
    plain_body = b"".join(line for line in reply.body.split(b"\r\n") if len(line) != 1 or split is None)
    for core in _cores(REAL.encode()):
        assert core not in reply.body
        assert core not in plain_body


@pytest.mark.req("SEC-3")
def test_headers_of_an_answer_lose_the_value(world: World) -> None:
    def answer(seen: Seen) -> bytes:
        real = _with_real(seen)
        return plain(
            b"moved",
            b"Location: https://evil.test/?t=" + quote(real).encode(),
            b"Set-Cookie: session=" + real + b"; Path=/",
            b"WWW-Authenticate: Basic " + base64.b64encode(b"u:" + real),
            b"Alt-Svc: h3=:443",
            status=b"302 " + real,
        )

    world.http1.answers[b"/moved"] = answer
    reply = say(world, request("GET", "/moved", f"Authorization: Bearer {PH}"), sandbox="s2")
    assert reply.status == 302
    for core in _cores(REAL.encode()):
        assert core not in reply.raw
    assert b"Set-Cookie: session=" + PH.encode() in reply.head
    assert b"Alt-Svc" not in reply.head


@pytest.mark.req("SEC-3")
def test_an_answer_that_cannot_be_looked_at_is_not_given(world: World) -> None:
    world.http1.answers[b"/br"] = lambda seen: plain(b"\x1b\x00", b"Content-Encoding: br")
    reply = say(world, request("GET", "/br", "Accept-Encoding: gzip, br"), sandbox="s2")
    assert world.http1.seen[-1].header("accept-encoding") == b"identity"
    assert reply.status == 502
    assert world.gate.denial(reply.connection)["code"] == "encoded_response"
    open_reply = say(world, request("GET", "/br", "Accept-Encoding: gzip"), sandbox="s1")
    assert open_reply.body == b"\x1b\x00"
    assert world.http1.seen[-1].header("accept-encoding") == b"gzip"


@pytest.mark.req("SEC-3")
@pytest.mark.parametrize("how", ECHOES)
def test_a_compressed_answer_is_looked_through(world: World, how: str) -> None:
    """Files that are compressed anyway (apt's lists) come as they are; one with a value in it is cut off."""
    harmless = gzip.compress(os.urandom(200_000) + LONG)
    world.http1.answers[b"/file.gz"] = lambda seen: plain(harmless, b"Content-Encoding: x-gzip")
    assert say(world, request("GET", "/file.gz"), sandbox="s2").body == harmless
    leak = gzip.compress(os.urandom(200_000) + ECHOES[how](REAL.encode()) + os.urandom(200_000))
    world.http1.answers[b"/leak.gz"] = lambda seen: plain(leak, b"Content-Encoding: gzip")
    talk = Talk(world, sandbox="s2")
    talk.send(request("GET", "/leak.gz"))
    reply = talk.reply(until_end=True)
    assert reply.status == 200
    assert len(reply.body) < len(leak)
    decoded = zlib.decompressobj(31).decompress(reply.body)
    assert not any(core in decoded for core in _cores(REAL.encode()))
    assert world.gate.denial(talk.connection)["code"] == "encoded_response"


def test_a_stream_of_events_is_not_held_back(world: World) -> None:
    talk = Talk(world, sandbox="s2")
    world.http1.answers[b"/events"] = [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", b"data: one\n\n"]
    talk.send(request("GET", "/events"))
    got = b""
    while not got.endswith(b"data: one\n\n"):
        got += talk.socket.recv(1 << 16)
    talk.close()


@pytest.mark.req("SEC-4")
def test_what_is_forgotten_ends_at_once_and_new_secrets_hold_at_once(world: World) -> None:
    world.gate.sandbox("s3", TOKEN)
    talk = Talk(world, sandbox="s3")
    assert talk.say(request("GET", "/", f"Authorization: Bearer {PH}")).status == 200
    world.gate.sandbox("s3", secret("TOKEN", "another-value-of-it", "api.test"))
    assert talk.say(request("GET", "/", f"Authorization: Bearer {PH}")).status == 200
    assert world.http1.seen[-1].header("authorization") == b"Bearer another-value-of-it"
    world.gate.send({"t": "forget", "id": "s3"})
    assert talk.reply(until_end=True).raw == b""
    wait_until(lambda: world.gate.of("closed", talk.connection), "the end", 1.0)
    later = Talk(world, sandbox="s3")
    later.send(request("GET", "/"))
    assert b"200" not in later.reply(until_end=True).raw


def test_no_secret_is_in_what_the_process_wrote(world: World) -> None:
    text = (world.directory / "log").read_text() + json.dumps(world.gate.messages)
    for value in (REAL, BODY_REAL, "the-only-right-credential"):
        assert value not in text
        assert json.dumps(value)[1:-1] not in text
