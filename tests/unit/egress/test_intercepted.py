"""Connections that an interceptor sees into: the gate decides, asks, dials and records; the interceptor only names the connection."""

import asyncio
import socket
from pathlib import Path

import pytest

from cloche.wire.egress import EgressLimits, EgressRule
from cloche.wire.errors import error
from cloche_server.egress.attempt import Refused
from cloche_server.policy.model import Effect
from tests.unit.egress.hellos import hello
from tests.unit.egress.test_forward import Web, get
from tests.unit.egress.test_gate import Marked
from tests.unit.egress.test_tunnels import HERE, HOST
from tests.unit.egress.world import dialled_instead, echo, opened, serving

RULE = EgressRule(host=HOST, methods=["GET"], paths=["/public/**"])


class Process:
    """An interceptor in the test's own loop: the test plays its part by hand."""

    def __init__(self) -> None:
        self.opened: list[tuple] = []
        self.missing = False

    async def open(self, gate_side, who, target, *, tls, rule):
        if self.missing:
            raise error("interceptor_missing", "There is no Python 3.12 here.")
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.opened.append((gate_side, who, target, tls, rule, theirs))
        return ours


async def received(sock: socket.socket, count: int) -> bytes:
    data = b""
    async with asyncio.timeout(5):
        while len(data) < count:
            data += await asyncio.get_running_loop().sock_recv(sock, count - len(data))
    return data


@pytest.mark.req("NET-8")
async def test_a_busy_client_is_slowed_down_before_it_is_refused(tmp_path: Path) -> None:
    process, limits = Process(), EgressLimits(attempts_per_s=40)
    async with opened(tmp_path, [RULE], organisation=HERE, ports=[443], interception=process, limits=limits) as world:
        stream = world.connect_proxy(HOST, 443)
        await stream.read(b"\r\n\r\n")
        stream.send(hello(HOST))
        await world.until(lambda: bool(process.opened))
        side, theirs = process.opened[0][0], process.opened[0][5]
        began = asyncio.get_running_loop().time()
        decisions = [await side.request("GET", "/public/x") for _ in range(80)]
        took_s = asyncio.get_running_loop().time() - began
        assert all(each.effect is Effect.ALLOW for each in decisions)
        assert 0.9 <= took_s < 5, "40 at once, 40 in the second after"
        crowd = await asyncio.gather(*(side.request("GET", "/public/x") for _ in range(300)))
        codes = [each.code for each in crowd if each.effect is Effect.DENY]
        assert set(codes) == {"rate_limited"}, "nobody waits for ever"
        side.closed()
        theirs.close()


@pytest.mark.req("NET-3")
async def test_a_rule_with_paths_sends_tls_to_the_interceptor_and_nothing_out(tmp_path: Path) -> None:
    process = Process()
    async with serving(echo) as server:
        async with opened(tmp_path, [RULE], organisation=HERE, ports=[443], interception=process) as world:
            with dialled_instead(server.port):
                stream = world.connect_proxy(HOST, 443)
                await stream.read(b"\r\n\r\n")
                first = hello(HOST)
                stream.send(first)
                await world.until(lambda: bool(process.opened))
                side, who, target, tls, rule, theirs = process.opened[0]
                assert (who.sandbox, target.host, tls, rule) == ("sk3m9q", HOST, True, "egress[0]")
                assert await received(theirs, len(first)) == first
                assert server.accepted == 0

                decision = await side.request("GET", "/public/x")
                assert decision.effect is Effect.ALLOW
                denied = await side.request("POST", "/public/x")
                assert (denied.effect, denied.code) == (Effect.DENY, "method_not_allowed")
                upstream = await side.dial()
                upstream.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(upstream, b"plain")
                assert await received(upstream, 5) == b"plain"
                assert server.accepted == 1

                await loop.sock_sendall(theirs, b"answer")
                assert await stream.read(b"answer") == b"answer"
                side.alert("placeholder_elsewhere", "the body", "TOKEN")
                side.denied("smuggling", "two lengths", "GET", "/x")
                side.closed()
                assert await received_end(upstream)
                theirs.close()
                upstream.close()
                await stream.rest()
                stream.eof()
                await stream.end()
                with pytest.raises(Refused):
                    await side.dial()
    kinds = [(each.verdict, each.code, each.method) for each in world.records()]
    assert kinds == [
        ("allowed", "allowed", None),
        ("allowed", "allowed", "GET"),
        ("denied", "method_not_allowed", "POST"),
        ("alert", "placeholder_elsewhere", None),
        ("denied", "smuggling", "GET"),
        ("closed", "closed", None),
    ]
    assert all(each.intercepted for each in world.records())
    assert world.records("closed")[0].address == "127.0.0.1"


async def received_end(sock: socket.socket) -> bool:
    async with asyncio.timeout(5):
        return await asyncio.get_running_loop().sock_recv(sock, 1) == b""


@pytest.mark.req("NET-4")
async def test_what_the_interceptor_dials_is_checked_too(tmp_path: Path) -> None:
    process = Process()
    async with opened(tmp_path, [RULE], organisation=HERE, interception=process) as world:
        stream = world.connect_proxy(HOST, 443)
        await stream.read(b"\r\n\r\n")
        stream.send(hello(HOST))
        await world.until(lambda: bool(process.opened))
        with pytest.raises(Refused, match="address_refused"):
            await process.opened[0][0].dial()
        process.opened[0][-1].close()


@pytest.mark.req("NET-9")
async def test_without_an_interceptor_nothing_goes_out(tmp_path: Path) -> None:
    process = Process()
    process.missing = True
    async with opened(tmp_path, [RULE], organisation=HERE, ports=[443], interception=process) as world:
        answer = await world.connect_proxy(HOST, 443).rest()
        assert answer.startswith(b"HTTP/1.1 503 Cloche: There is no Python 3.12 here.")
        assert b"X-Cloche-Denied: interceptor_missing" in answer
        assert world.gate.limits.connections == 0


@pytest.mark.req("NET-9")
async def test_an_interceptor_that_dies_ends_its_connections(tmp_path: Path) -> None:
    process = Process()
    async with serving(echo) as server:
        async with opened(tmp_path, [RULE], organisation=HERE, ports=[443], interception=process) as world:
            with dialled_instead(server.port):
                stream = world.connect_proxy(HOST, 443)
                await stream.read(b"\r\n\r\n")
                stream.send(hello(HOST))
                await world.until(lambda: bool(process.opened))
                side, *_, theirs = process.opened[0]
                upstream = await side.dial()
                await world.until(lambda: server.open == 1)
                theirs.close()
                upstream.close()
                side.closed()
                await stream.rest()
                stream.eof()
                await stream.end()
                await world.until(lambda: server.open == 0)


@pytest.mark.req("POL-3")
async def test_an_intercepted_request_is_asked_with_its_method_and_path(tmp_path: Path) -> None:
    process = Process()
    rule = EgressRule(effect="ask", host=HOST, methods=["POST"])
    async with serving(echo) as server:
        async with opened(tmp_path, [rule], organisation=HERE, ports=[443], interception=process) as world:
            with dialled_instead(server.port):
                world.person.answers = [True, False]
                stream = world.connect_proxy(HOST, 443)
                await stream.read(b"\r\n\r\n")
                assert not world.person.asked, "the connection alone is nothing to ask about"
                stream.send(hello(HOST))
                await world.until(lambda: bool(process.opened))
                side = process.opened[0][0]
                assert (await side.request("POST", "/deploy")).effect is Effect.ALLOW
                (await side.dial()).close()
                assert (await side.request("POST", "/again")).code == "not_approved"
                process.opened[0][-1].close()
    assert [(each.method, each.path, each.address) for each in world.person.asked] == [
        ("POST", "/deploy", "127.0.0.1"),
        ("POST", "/again", "127.0.0.1"),
    ]


@pytest.mark.req("SEC-3")
async def test_with_secrets_plain_http_goes_through_the_interceptor_too(tmp_path: Path) -> None:
    process, web = Process(), Web()
    async with serving(web) as server:
        async with opened(
            tmp_path, [HOST], organisation=HERE, ports=[80], interception=process, placeholders=Marked
        ) as world:
            stream = world.proxy(get("/a"))
            await world.until(lambda: bool(process.opened))
            side, _, target, tls, _, theirs = process.opened[0]
            assert (target.port, tls) == (80, False)
            expected = b"GET /a HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
            assert await received(theirs, len(expected)) == expected
            stream.send(get("/b"))
            assert b"GET /b" in await received(theirs, len(expected))
            assert side is not None
            theirs.close()
            await stream.rest()
    assert server.accepted == 0


@pytest.mark.req("POL-3")
async def test_a_name_that_only_a_pattern_matches_is_asked_for_before_it_is_intercepted(tmp_path: Path) -> None:
    process = Process()
    rules = [EgressRule(effect="ask", host="*.example.com", intercept=True)]
    async with opened(tmp_path, rules, organisation=HERE, ports=[443], interception=process) as world:
        world.person.answers = [False]
        assert b"not_approved" in await world.connect_proxy(HOST, 443).rest()
        assert not process.opened
        world.person.answers = [True]
        stream = world.connect_proxy(HOST, 443)
        await stream.read(b"\r\n\r\n")
        side = process.opened[0][0]
        assert (await side.request("GET", "/")).effect is Effect.ALLOW, "the connection was approved"
        process.opened[0][-1].close()
    assert [each.address for each in world.person.asked] == ["", ""]


async def test_the_end_of_the_clients_connection_closes_what_was_dialled_for_it(tmp_path: Path) -> None:
    process = Process()
    async with serving(echo) as server:
        async with opened(tmp_path, [RULE], organisation=HERE, ports=[443], interception=process) as world:
            with dialled_instead(server.port):
                stream = world.connect_proxy(HOST, 443)
                await stream.read(b"\r\n\r\n")
                stream.send(hello(HOST))
                await world.until(lambda: bool(world.gate.connections))
                upstream = await process.opened[0][0].dial()
                await world.until(lambda: server.open == 1)
                stream.abort()
                await world.until(lambda: server.open == 0)
                upstream.close()
                process.opened[0][-1].close()
