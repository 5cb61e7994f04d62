"""Servers that are wrong, hostile or gone: what the client gets, and that nothing hangs."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.unit.interceptor import authorities
from tests.unit.interceptor.conftest import World
from tests.unit.interceptor.gate import ALLOWED, Message, wait_until
from tests.unit.interceptor.http2 import Http2, h2_server, status
from tests.unit.interceptor.servers import Http1Server
from tests.unit.interceptor.talk import Talk, request, say

OK = b"HTTP/1.1 200 OK\r\n"
WRONG: dict[str, bytes] = {
    "CL and TE": OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two CL": OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "another TE": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a NUL in a header": OK + b"X: a\0b\r\nContent-Length: 0\r\n\r\n",
    "a header in two lines": OK + b"X: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "nothing": b"",
    "half a head": OK + b"Content-Le",
}


@pytest.mark.parametrize("row", WRONG)
def test_a_wrong_answer_is_not_passed_on(world: World, row: str) -> None:
    world.http1.answers[b"/wrong"] = [WRONG[row]]
    world.http1.closes.add(b"/wrong")
    reply = say(world, request("GET", "/wrong"))
    assert reply.status == 502, reply.raw
    assert b"x-cloche-denied: " in reply.head.lower()
    assert b"SSH" not in reply.raw
    assert world.gate.denial(reply.connection)["code"] in ("bad_response", "upstream_failed")


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Length: 100\r\n\r\nabc",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_an_answer_that_is_cut_off_is_seen_as_cut_off(world: World, body: bytes) -> None:
    world.http1.answers[b"/cut"] = [OK + body]
    world.http1.closes.add(b"/cut")
    talk = Talk(world)
    talk.send(request("GET", "/cut"))
    reply = talk.reply(until_end=True)
    assert reply.status == 200
    assert not reply.body.endswith(b"0\r\n\r\n")
    assert len(reply.body) < 100


def test_trailers_of_an_http1_answer_are_left_out(world: World) -> None:
    """As every recipient may. The answer is whole, and the connection goes on."""
    world.http1.answers[b"/trailer"] = [OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX: y\r\n\r\n"]
    talk = Talk(world)
    for _ in range(2):
        reply = talk.say(request("GET", "/trailer"))
        assert reply.raw.endswith(b"2\r\nab\r\n0\r\n\r\n")


def test_interim_answers_are_passed_over(world: World) -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\n\r\n"
    world.http1.answers[b"/hints"] = [
        hints,
        hints + b"HTTP/1.1 1",
        b"00 Continue\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nok",
    ]
    talk = Talk(world)
    for _ in range(2):
        reply = talk.say(request("GET", "/hints"))
        assert reply.raw.startswith(OK)
        assert reply.body == b"ok"


def test_an_upgrade_that_nobody_asked_for_ends_the_connection(world: World) -> None:
    world.http1.answers[b"/upgrade"] = [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: raw\r\nConnection: upgrade\r\n\r\n"
    ]
    talk = Talk(world)
    talk.send(request("GET", "/upgrade", "Connection: upgrade", "Upgrade: raw"))
    talk.reply()
    with contextlib.suppress(OSError):  # it may be closed already
        talk.send(b"raw bytes")
    assert talk.reply(until_end=True).raw == b""
    assert b"raw bytes" not in world.http1.raw


def test_an_early_answer_to_an_upload_comes_through(world: World) -> None:
    server = Http1Server(authorities.server_context(world.directory, authorities.leaf(world.root, "early.test")))

    async def answer_at_once(seen: object, *_: object) -> bytes:
        return b""

    server._body = answer_at_once  # type: ignore[method-assign,assignment]
    server.answers[b"/up"] = [b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"]
    world.loop.run(server.start())
    world.gate.upstreams[("early.test", 443)] = server.address
    talk = Talk(world, "early.test")
    talk.send(request("POST", "/up", "Content-Length: 100000000", host="early.test") + b"x" * 1000)
    assert talk.reply().status == 413


def test_expect_gets_its_continue_after_the_verdict(world: World) -> None:
    talk = Talk(world)
    talk.send(request("POST", "/", "Content-Length: 3", "Expect: 100-continue"))
    got = b""
    while b"\r\n\r\n" not in got:
        got += talk.socket.recv(1000)
    assert got.startswith(b"HTTP/1.1 100")
    assert world.gate.of("request", talk.connection)
    assert talk.say(b"abc").status == 200
    denied: Message = {"allow": False, "status": 403, "code": "no_rule", "text": "no", "rule": "default"}
    world.gate.verdict = lambda asked: denied
    try:
        reply = say(world, request("POST", "/", "Content-Length: 3", "Expect: 100-continue"))
    finally:
        world.gate.verdict = lambda asked: ALLOWED
    assert reply.raw.startswith(b"HTTP/1.1 403")


@pytest.mark.req("NET-5")
def test_http2_is_never_turned_into_http1(world: World, interceptor_interpreter: Path) -> None:
    """The server speaks HTTP/2 at first and, when dialled again, HTTP/1 alone."""
    certificate = world.directory / "h2.pem"
    certificate.write_text(world.leaf.cert + world.leaf.key)
    with h2_server(interceptor_interpreter, certificate) as address:
        world.gate.upstreams[("h2.test", 443)] = address
        client = Http2(world, interceptor_interpreter)
        assert status(client.ask("GET", "/echo")) == 200
    world.gate.upstreams[("h2.test", 443)] = world.http1.address
    seen = len(world.http1.seen)
    with client:
        answers = [client.ask("GET", "/echo") for _ in range(2)]
    assert 200 not in map(status, answers)
    assert len(world.http1.seen) == seen


def test_a_client_that_leaves_while_it_waits_leaves_nothing(world: World) -> None:
    asked: list[Message] = []

    def never(question: Message) -> Message:
        asked.append(question)
        wait_until(lambda: world.gate.of("closed", talk.connection), "the end of the connection")
        return ALLOWED

    world.gate.verdict = never
    seen = len(world.http1.seen)
    try:
        talk = Talk(world)
        talk.send(request("GET", "/"))
        wait_until(lambda: asked, "the question")
        talk.close()
        wait_until(lambda: world.gate.of("closed", talk.connection), "the end of the connection")
    finally:
        world.gate.verdict = lambda question: ALLOWED
    assert say(world, request("GET", "/")).status == 200
    assert len(world.http1.seen) == seen + 1


@pytest.mark.parametrize(("sandbox", "lineage"), [("nobody", "l1"), ("s1", "nobody")])
def test_what_was_not_made_known_gets_nowhere(world: World, sandbox: str, lineage: str) -> None:
    client, connection = world.gate.open("api.test", sandbox=sandbox, lineage=lineage)
    context = authorities.client_context(world.lineage)
    raw = b"closed"
    try:
        talk = context.wrap_socket(client, server_hostname="api.test")
        talk.sendall(request("GET", "/"))
        raw = talk.recv(1000)
    except OSError:
        pass  # refused in the handshake
    assert not raw.startswith(b"HTTP/1.1 200")
    assert world.gate.denial(connection)["code"] == "protocol_error"


def test_many_connections_at_once(world: World) -> None:
    talks = [Talk(world) for _ in range(60)]
    for talk in talks:
        talk.send(request("GET", "/many"))
    assert [talk.reply().status for talk in talks] == [200] * 60
    for talk in talks:
        talk.close()
    wait_until(lambda: all(world.gate.of("closed", talk.connection) for talk in talks), "the ends")


def test_the_process_outlives_all_of_this(world: World) -> None:
    os.kill(world.gate.process.pid, signal.SIG_DFL)
    assert world.gate.process.poll() is None
    assert say(world, request("GET", "/")).status == 200
