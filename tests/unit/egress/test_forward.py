"""Plain HTTP through the proxy, and inside tunnels to port 80."""

import asyncio
import re
from pathlib import Path

import pytest

from cloche.wire.egress import EgressRule
from tests.unit.egress.test_tunnels import HERE, HOST, org
from tests.unit.egress.world import dialled_instead, echo, opened, serving

OTHER = "other.example.com"
BOTH = org(api_example_com="127.0.0.1", other_example_com="127.0.0.1")


class Web:
    """A small strict HTTP/1.1 server that tells what it heard."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            if b"chunked" in head:
                body = await reader.readuntil(b"0\r\n\r\n")
            self.heard.append(head + body)
            if b"Upgrade: websocket" in head and b"/refuse" not in head:
                writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
                await echo(reader, writer)
                return
            path = head.split(b" ")[1]
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(path), path))
            await writer.drain()


def get(path: str = "/", host: str = HOST, method: str = "GET", extra: str = "") -> bytes:
    return (
        f"{method} http://{host}{path} HTTP/1.1\r\nHost: {host}\r\nProxy-Connection: keep-alive\r\n{extra}\r\n".encode()
    )


def origin(path: str = "/", host: str = HOST) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


async def test_requests_share_one_connection_and_one_record(tmp_path: Path) -> None:
    web = Web()
    async with serving(web) as server:
        async with opened(tmp_path, [HOST], organisation=HERE, ports=[80]) as world:
            with dialled_instead(server.port):
                stream = world.proxy()
                for number in range(5):
                    stream.send(get(f"/{number}"))
                    assert (await stream.read(f"\r\n\r\n/{number}".encode())).startswith(b"HTTP/1.1 200 OK")
                stream.send(get("/post", method="POST", extra="Content-Length: 4\r\n") + b"bo")
                stream.send(b"dy")
                await stream.read(b"/post")
                chunked = get("/chunk", method="POST", extra="Transfer-Encoding: chunked\r\n")
                stream.send(chunked + b"3\r\nabc\r\n0\r\n\r\n" + get("/last"))
                await stream.read(b"/last")
                stream.eof()
                await stream.end()
    assert server.accepted == 1
    assert web.heard[0] == b"GET /0 HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "nothing for the proxy goes upstream"
    assert web.heard[5].endswith(b"\r\n\r\nbody")
    assert [(each.verdict, each.text) for each in world.records()][1] == ("closed", "8 requests")
    assert len(world.records()) == 2


@pytest.mark.req("NET-3")
async def test_another_host_goes_all_steps_again(tmp_path: Path) -> None:
    web = Web()
    async with serving(web) as server:
        async with opened(tmp_path, [HOST, OTHER], organisation=BOTH, ports=[80]) as world:
            with dialled_instead(server.port):
                stream = world.proxy(get("/a"))
                await stream.read(b"/a")
                stream.send(get("/b", OTHER))
                await stream.read(b"/b")
                stream.send(get("/c", "evil.example") + get("/never", HOST))
                assert b"X-Cloche-Denied: no_rule" in await stream.rest()
    assert [each.split(b"\r\n")[1] for each in web.heard] == [b"Host: api.example.com", b"Host: other.example.com"]
    assert [(each.verdict, each.host) for each in world.records()] == [
        ("allowed", HOST), ("closed", HOST), ("allowed", OTHER), ("closed", OTHER), ("denied", "evil.example"),
    ]  # fmt: skip


@pytest.mark.req("NET-3")
@pytest.mark.req("NET-6")
async def test_methods_and_paths_are_seen_request_by_request(tmp_path: Path) -> None:
    web = Web()
    rule = EgressRule(host=HOST, ports=[80], methods=["GET"], paths=["/public/**"])
    async with serving(web) as server:
        async with opened(tmp_path, [rule], organisation=HERE, ports=[80]) as world:
            with dialled_instead(server.port):
                stream = world.proxy(get("/public/a"))
                await stream.read(b"/public/a")
                stream.send(get("/public/b?secret=1"))
                await stream.read(b"/public/b")
                stream.send(get("/private"))
                assert b"X-Cloche-Denied: path_not_allowed" in await stream.rest()
                assert b"method_not_allowed" in await world.proxy(get("/public/x", method="POST")).rest()
                tunnel = world.connect_proxy(HOST, 80)
                await tunnel.read(b"\r\n\r\n")
                tunnel.send(origin("/public/t"))
                await tunnel.read(b"/public/t")
                tunnel.send(origin("/private"))
                assert b"path_not_allowed" in await tunnel.rest()
    assert not [each for each in web.heard if b"private" in each or b"POST" in each]
    seen = [(each.verdict, each.method, each.path) for each in world.records() if each.path]
    assert ("allowed", "GET", "/public/b") in seen, "without its query"
    assert ("denied", "GET", "/private") in seen


@pytest.mark.req("NET-5")
@pytest.mark.parametrize(
    ("inside", "code"),
    [
        (origin("/", "evil.example"), b"host_mismatch"),
        (b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"host_mismatch"),
        (b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n", b"bad_request"),
        (b"GET / HTTP/1.1\r\nHost: api.example.com\r\nHost: evil.example\r\n\r\n", b"bad_request"),
        (
            b"POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"bad_request",
        ),
        (b"\x16\x03\x01\x00\x05hello", b"bad_request"),
    ],
)
async def test_in_a_tunnel_to_port_80_only_its_host_can_be_asked(tmp_path: Path, inside: bytes, code: bytes) -> None:
    web = Web()
    async with serving(web) as server:
        async with opened(tmp_path, [HOST], organisation=HERE, ports=[80]) as world:
            with dialled_instead(server.port):
                tunnel = world.connect_proxy(HOST, 80)
                await tunnel.read(b"\r\n\r\n")
                tunnel.send(origin("/first"))
                await tunnel.read(b"/first")
                tunnel.send(inside)
                assert b"X-Cloche-Denied: " + code in await tunnel.rest()
            await world.until(lambda: server.open == 0)
            assert world.codes() == [code.decode()]
    assert len(web.heard) == 1


@pytest.mark.parametrize(
    "bad",
    [
        b"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
        b"GET ftp://api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
        b"GET http://u:p@api.example.com/ HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
        b"GET http://api.example.com/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"\x00\x01\x02",
        b"GET http://api.example.com/ HTTP/1.1\nHost: api.example.com\n\n",
    ],
)
@pytest.mark.req("NET-5")
async def test_what_a_proxy_does_not_take(tmp_path: Path, bad: bytes) -> None:
    async with opened(tmp_path, [HOST], organisation=HERE, ports=[80]) as world:
        answer = await world.proxy(bad).rest()
        assert answer.startswith(b"HTTP/1.1 400 Cloche: ")
        assert world.codes() == ["bad_request"]


async def test_a_websocket_is_opaque_only_if_the_server_agreed(tmp_path: Path) -> None:
    web = Web()
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
    async with serving(web) as server:
        async with opened(tmp_path, [HOST], organisation=HERE, ports=[80]) as world:
            with dialled_instead(server.port):
                stream = world.proxy(get("/chat", extra=upgrade) + b"\x81\x05early")
                await stream.read(b" 101 ")
                await stream.read(b"\x81\x05early")
                stream.send(b"\x81\x04more")
                await stream.read(b"\x81\x04more")
                stream.eof()
                await stream.end()
                stream = world.proxy(get("/refuse", extra=upgrade))
                await stream.read(b"\r\n\r\n/refuse")
                stream.send(b"\x81\x05not http")
                assert b"X-Cloche-Denied: bad_request" in await stream.rest()
                stream = world.proxy(get("/refuse", extra=upgrade) + get("/next"))
                await stream.read(b"/next")
    assert len(web.heard) == 4


async def test_the_server_ends_the_connection(tmp_path: Path) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nuntil the end")

    async with serving(once) as server:
        async with opened(tmp_path, [HOST], organisation=HERE, ports=[80]) as world:
            with dialled_instead(server.port):
                stream = world.proxy(get())
                assert (await stream.rest()).endswith(b"until the end")
                stream.eof()
                assert await stream.end() == {"ok": {}}


async def test_a_slow_head_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte by byte, never ending: before the first request, and between two."""
    for module in ("conversations.talk", "conversations.proxy", "forward"):
        monkeypatch.setattr(f"cloche_server.egress.{module}.HEAD_S", 0.2)
    web = Web()
    async with serving(web) as server:
        async with opened(tmp_path, [HOST], organisation=HERE, ports=[80]) as world:
            with dialled_instead(server.port):
                slow = world.proxy(b"GET http://api")
                kept = world.proxy(get("/a"))
                await kept.read(b"/a")
                kept.send(b"GET ht")
                for stream in (slow, kept):
                    for _ in range(40):
                        if stream.eof_received:
                            break
                        stream.send(b"x")
                        await asyncio.sleep(0.02)
                    assert b" 408 Cloche" in await stream.rest()
    assert server.open == 0


async def test_a_slow_body_is_no_slow_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of the first request, which comes before there is a connection."""
    for module in ("conversations.talk", "conversations.proxy", "forward"):
        monkeypatch.setattr(f"cloche_server.egress.{module}.HEAD_S", 0.2)
    web = Web()
    async with serving(web) as server:
        async with opened(tmp_path, [HOST], organisation=HERE, ports=[80]) as world:
            with dialled_instead(server.port):
                stream = world.proxy()
                for number in range(2):
                    stream.send(get(f"/{number}", method="POST", extra="Content-Length: 10\r\n"))
                    for _ in range(10):
                        stream.send(b"x")
                        await asyncio.sleep(0.04)  # longer, in all, than a head may take
                    assert (await stream.read(f"\r\n\r\n/{number}".encode())).startswith(b"HTTP/1.1 200 OK")
    assert [each[-10:] for each in web.heard] == [b"x" * 10] * 2


async def test_an_endless_head_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path, [HOST], organisation=HERE, ports=[80]) as world:
        stream = world.proxy(b"GET http://api.example.com/ HTTP/1.1\r\n")
        filler = b"X-Filler: " + b"y" * 1000 + b"\r\n"
        for _ in range(63):
            stream.send(filler)
        await stream.send_all(filler * 4)
        assert b"HTTP/1.1 400" in await stream.rest()
        assert world.codes() == ["bad_request"]


@pytest.mark.req("POL-3")
async def test_each_request_to_an_ask_rule_is_asked(tmp_path: Path) -> None:
    web = Web()
    rule = EgressRule(effect="ask", host=HOST, ports=[80])
    async with serving(web) as server:
        async with opened(tmp_path, [rule], organisation=HERE, ports=[80]) as world:
            world.person.answers = [True, True, False]
            with dialled_instead(server.port):
                stream = world.proxy(get("/one"))
                await stream.read(b"/one")
                stream.send(get("/two"))
                await stream.read(b"/two")
                stream.send(get("/three"))
                assert b"not_approved" in await stream.rest()
    asked = world.person.asked
    assert [(each.method, each.path, each.address) for each in asked] == [
        ("GET", "/one", "127.0.0.1"), ("GET", "/two", "127.0.0.1"), ("GET", "/three", "127.0.0.1"),
    ]  # fmt: skip
    assert asked[0].command_line == "run command-1"
    assert len(web.heard) == 2


@pytest.mark.req("NET-3")
async def test_a_header_that_changes_the_method_must_be_allowed_too(tmp_path: Path) -> None:
    web = Web()
    rule = EgressRule(host=HOST, ports=[80], methods=["POST"])
    async with serving(web) as server:
        async with opened(tmp_path, [rule], organisation=HERE, ports=[80]) as world:
            with dialled_instead(server.port):
                override = "X-HTTP-Method-Override: DELETE\r\n"
                assert b"method_not_allowed" in await world.proxy(get("/a", method="POST", extra=override)).rest()
                stream = world.proxy(get("/b", method="POST"))
                await stream.read(b"/b")
                stream.send(get("/c", method="POST", extra=override))
                assert b"method_not_allowed" in await stream.rest()
    assert len(web.heard) == 1
    assert "POST as DELETE" in [each.method for each in world.records("denied")]


@pytest.mark.req("NET-6")
async def test_a_request_that_cannot_be_recorded_does_not_go_out(tmp_path: Path) -> None:
    web = Web()
    rule = EgressRule(host=HOST, ports=[80], methods=["GET"])
    async with serving(web) as server:
        async with opened(tmp_path, [rule], organisation=HERE, ports=[80]) as world:
            with dialled_instead(server.port):
                stream = world.proxy(get("/a"))
                await stream.read(b"/a")
                world.gate.records._journal = full
                stream.send(get("/b"))
                assert b"X-Cloche-Denied: internal" in await stream.rest()
                world.gate.records._journal = world.journal.append
    assert len(web.heard) == 1


def full(record: object) -> None:
    raise OSError(28, "the disk is full")


async def test_a_defect_in_the_middle_ends_the_connection_and_nothing_else(tmp_path: Path) -> None:
    web = Web()
    rules = [EgressRule(effect="ask", host=HOST, ports=[80]), OTHER]
    async with serving(web) as server:
        async with opened(tmp_path, rules, organisation=BOTH, ports=[80]) as world:
            with dialled_instead(server.port):
                world.person.answers = [True, True]
                neighbour = world.proxy(get("/n", OTHER))
                await neighbour.read(b"/n")
                stream = world.proxy(get("/one"))
                await stream.read(b"/one")
                world.person.before_answer = fail
                stream.send(get("/two"))
                assert (await stream.end())["error"]["code"] == "internal"
                await world.until(lambda: server.open == 1)
                neighbour.send(get("/m", OTHER))
                await neighbour.read(b"/m")


def fail() -> None:
    raise RuntimeError("a defect")
