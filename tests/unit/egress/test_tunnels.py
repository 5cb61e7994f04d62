"""CONNECT, SOCKS and programs that know no proxy: what is let through, and what each client reads when it is not."""

import asyncio
import json
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import pytest

from cloche.wire.egress import EgressLimits, EgressRule
from cloche_server.egress.refusals import TLS_ACCESS_DENIED
from cloche_server.policy.document import Organisation
from tests.unit.egress.hellos import hello
from tests.unit.egress.world import LOOPBACK, dialled_instead, echo, nameserver, opened, serving

HOST = "api.example.com"


def tcp(host: str, port: int) -> EgressRule:
    return EgressRule(host=host, ports=[port], protocol="tcp")


def org(**hosts: str) -> Organisation:
    return Organisation(hosts={name.replace("_", "."): ip_address(at) for name, at in hosts.items()})


HERE = org(api_example_com="127.0.0.1")


@pytest.mark.req("NET-1")
@pytest.mark.req("NET-6")
async def test_an_allowed_tunnel_carries_bytes_both_ways_and_is_recorded(tmp_path: Path) -> None:
    async with serving(echo) as server:
        async with opened(tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE) as world:
            stream = world.connect_proxy(HOST, server.port)
            assert b" 200 " in await stream.read(b"\r\n\r\n")
            stream.send(b"hello")
            assert await stream.read(b"hello") == b"hello"
            stream.eof()
            await stream.rest()
            assert await stream.end() == {"ok": {}}
            allowed, closed = world.records()
    assert (allowed.verdict, allowed.code, allowed.rule, allowed.host, allowed.port) == (
        "allowed", "allowed", "egress[0]", HOST, server.port,
    )  # fmt: skip
    assert (allowed.address, allowed.command, allowed.sandbox) == ("127.0.0.1", "command-1", "sk3m9q")
    assert (closed.verdict, closed.bytes_up, closed.bytes_down) == ("closed", 5, 5)
    assert closed.connection == allowed.connection
    assert closed.duration_s is not None
    assert closed.duration_s > 0
    assert [json.loads(line)["seq"] for line in (tmp_path / "egress.jsonl").read_text().splitlines()] == [1, 2]


@pytest.mark.req("NET-2")
@pytest.mark.req("NET-7")
async def test_nothing_is_allowed_by_nothing_and_the_refusal_can_be_read(tmp_path: Path) -> None:
    async with opened(tmp_path) as world:
        stream = world.connect_proxy("pastebin.example", 443)
        head, _, body = (await stream.rest()).partition(b"\r\n\r\n")
        stream.eof()
        await stream.end()
        record = world.records()[0]
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 403 Cloche: No rule allows pastebin.example:443."
    assert "X-Cloche-Denied: no_rule" in lines
    assert "Connection: close" in lines
    assert b"cloche egress allow sk3m9q pastebin.example --for 10m" in body
    assert (record.verdict, record.code, record.rule, record.host) == (
        "denied",
        "no_rule",
        "default",
        "pastebin.example",
    )
    assert "cloche egress allow" in record.text


ADDRESSES = [
    ("127.0.0.1", "loopback"),
    ("169.254.169.254", "metadata"),
    ("10.1.2.3", "private"),
    ("100.64.0.1", "cgnat"),
    ("::1", "loopback"),
    ("::ffff:169.254.169.254", ""),
    ("64:ff9b::a9fe:a9fe", ""),
    ("2002:7f00:1::", ""),
    ("fe80::1", ""),
]


@pytest.mark.req("NET-4")
@pytest.mark.parametrize(("address", "kind"), ADDRESSES)
async def test_a_name_with_a_refused_address_is_refused(tmp_path: Path, address: str, kind: str) -> None:
    organisation = Organisation(hosts={HOST: ip_address(address)})
    async with opened(tmp_path, [HOST], organisation=organisation) as world:
        answer = await world.connect_proxy(HOST, 443).rest()
        assert b"X-Cloche-Denied: address_refused" in answer
        assert world.codes() == ["address_refused"]
        assert kind in world.records()[0].text


@pytest.mark.req("NET-4")
async def test_one_refused_address_refuses_the_whole_answer(tmp_path: Path) -> None:
    async with serving(echo) as server:
        with nameserver({HOST: ["127.0.0.1", "169.254.169.254"]}) as (names, asked):
            rules = [tcp(HOST, server.port)]
            async with opened(tmp_path, rules, ports=[server.port], nameservers=(names,)) as world:
                for _ in range(8):  # the name server shuffles them
                    answer = await world.connect_proxy(HOST, server.port).rest()
                    assert b"address_refused" in answer
                assert asked == [HOST] * 8
        assert server.accepted == 0


@pytest.mark.req("NET-4")
async def test_rebinding_the_checked_address_is_the_one_dialled(tmp_path: Path) -> None:
    """A name server that says something else every time: what was checked is dialled, and nothing is asked in between."""
    answers = iter(["127.0.0.1", "127.0.0.2", "127.0.0.1"])
    async with serving(echo) as server:
        with nameserver({HOST: lambda: [next(answers)]}) as (names, asked):
            rules = [tcp(HOST, server.port)]
            async with opened(tmp_path, rules, ports=[server.port], nameservers=(names,)) as world:
                stream = world.connect_proxy(HOST, server.port)
                await stream.read(b" 200 ")
                assert len(asked) == 1
                assert b"address_refused" in await world.connect_proxy(HOST, server.port).rest()
                assert len(asked) == 2
                assert server.accepted == 1


@pytest.mark.req("NET-5")
@pytest.mark.parametrize(
    ("first", "code", "seen"),
    [
        (hello("other.example.com"), "sni_mismatch", TLS_ACCESS_DENIED),
        (hello(None), "sni_missing", TLS_ACCESS_DENIED),
        (b"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "not_tls", b"HTTP/1.1 403 Cloche: only TLS"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not_tls", b""),
    ],
)
async def test_what_a_tls_port_must_carry(tmp_path: Path, first: bytes, code: str, seen: bytes) -> None:
    got = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            got.extend(data)

    async with serving(listen) as server:
        async with opened(tmp_path, [HOST], organisation=HERE, ports=[443]) as world:
            with dialled_instead(server.port):
                stream = world.connect_proxy(HOST, 443)
                await stream.read(b"\r\n\r\n")
                stream.send(first)
                answer = await stream.rest()
            assert answer.startswith(seen)
            assert world.codes() == [code]
            assert world.codes("closed") == [code]
    assert not got, "nothing of it went out"


@pytest.mark.req("NET-5")
async def test_a_hello_for_the_right_host_goes_through_as_it_came(tmp_path: Path) -> None:
    async with serving(echo) as server:
        async with opened(tmp_path, [HOST], organisation=HERE, ports=[443]) as world:
            with dialled_instead(server.port):
                stream = world.connect_proxy(HOST, 443)
                await stream.read(b"\r\n\r\n")
                whole = hello(HOST)
                for at in range(0, len(whole), 100):
                    stream.send(whole[at : at + 100])
                    await asyncio.sleep(0)
                assert await stream.read(whole) == whole


@pytest.mark.req("NET-5")
async def test_ech_is_refused_where_the_organisation_says_so(tmp_path: Path) -> None:
    """The outer name is right; the file decides whether an inner one may hide behind it."""
    first = with_ech(hello(HOST))
    for ech, code in (("refuse", ["ech_refused"]), ("allow", [])):
        async with serving(echo) as server:
            organisation = replace(HERE, ech=ech)  # type: ignore[arg-type]
            async with opened(tmp_path / ech, [HOST], organisation=organisation, ports=[443]) as world:
                with dialled_instead(server.port):
                    stream = world.connect_proxy(HOST, 443)
                    await stream.read(b"\r\n\r\n")
                    stream.send(first)
                    await stream.read(first if ech == "allow" else TLS_ACCESS_DENIED)
                assert world.codes() == code


@pytest.mark.req("NET-10")
async def test_a_program_without_proxy_resolves_connects_and_is_refused_in_its_words(tmp_path: Path) -> None:
    async with serving(echo) as server:
        rules = [tcp(HOST, server.port), "web.example.com"]
        async with opened(tmp_path, rules, ports=[server.port], organisation=HERE) as world:
            assert await world.guest.ask(HOST) == [server.port]
            assert await world.guest.ask("web.example.com") == [443, 80]
            assert await world.guest.ask("evil.example") == []
            assert await world.guest.ask("evil.example") == []
            assert world.codes() == ["no_rule"], "the same name is told once"
            stream = world.guest.open("connect", name=HOST, port=server.port)
            stream.send(b"x")
            assert await stream.read(b"x") == b"x"
            refused = world.guest.open("connect", name="evil.example", port=443)
            refused.send(hello("evil.example"))
            assert await refused.rest() == TLS_ACCESS_DENIED
            refused = world.guest.open("connect", name="evil.example", port=80)
            refused.send(b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
            assert b"X-Cloche-Denied: no_rule" in await refused.rest()
            refused = world.guest.open("connect", name="evil.example", port=5432)
            refused.send(b"\0\0\0\x08\x04\xd2\x16\x2f")
            assert (await refused.end())["error"]["code"] == "no_rule"


@pytest.mark.req("NET-5")
@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"\x05\x01\x00\x03\x0fapi.example.com" + (4444).to_bytes(2), b"\x05\x02"),
        (b"\x05\x01\x00\x01\x0a\x00\x00\x01" + (80).to_bytes(2), b"\x05\x02"),
        (b"\x05\x03\x00\x01\x7f\x00\x00\x01" + (80).to_bytes(2), b"\x05\x07"),
    ],
)
async def test_socks_refusals(tmp_path: Path, request_: bytes, answer: bytes) -> None:
    async with opened(tmp_path, [tcp(HOST, 5555)], organisation=HERE) as world:
        stream = world.proxy(b"\x05\x01\x00")
        assert await stream.read(b"\x05\x00")
        stream.send(request_)
        assert (await stream.rest()).startswith(answer)
        assert len(world.records("denied")) == 1


@pytest.mark.req("NET-5")
async def test_socks_carries_what_a_rule_names(tmp_path: Path) -> None:
    async with serving(echo) as server:
        async with opened(tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE) as world:
            name = HOST.encode()
            request = b"\x05\x01\x00\x03" + bytes([len(name)]) + name + server.port.to_bytes(2)
            stream = world.proxy(b"\x05\x01\x00" + request + b"early")
            assert await stream.read(b"\x05\x00")
            assert await stream.read(b"\x05\x00\x00\x01\0\0\0\0\0\0")
            assert await stream.read(b"early") == b"early"


@pytest.mark.req("NET-7")
async def test_what_cannot_be_resolved_or_reached_says_so(tmp_path: Path) -> None:
    organisation = Organisation(hosts={HOST: LOOPBACK})
    async with serving(echo) as server:
        port = server.port
    with nameserver({}) as (names, _):
        rules = [tcp(HOST, port), "nowhere.example.com"]
        async with opened(tmp_path, rules, ports=[port], organisation=organisation, nameservers=(names,)) as world:
            answer = await world.connect_proxy(HOST, port).rest()
            assert answer.startswith(b"HTTP/1.1 502 Cloche: api.example.com:")
            assert b"X-Cloche-Denied: unreachable" in answer
            answer = await world.connect_proxy("nowhere.example.com", 443).rest()
            assert b"X-Cloche-Denied: unresolved" in answer
            assert [(each.verdict, each.code) for each in world.records()] == [
                ("allowed", "allowed"), ("closed", "unreachable"), ("denied", "unresolved"),
            ]  # fmt: skip


@pytest.mark.req("NET-8")
async def test_connections_and_attempts_are_limited(tmp_path: Path) -> None:
    async with serving(echo) as server:
        rules, limits = [tcp(HOST, server.port)], EgressLimits(connections=2, attempts_per_s=8)
        async with opened(tmp_path, rules, ports=[server.port], organisation=HERE, limits=limits) as world:
            first = [world.connect_proxy(HOST, server.port) for _ in range(2)]
            for stream in first:
                await stream.read(b" 200 ")
            third = await world.connect_proxy(HOST, server.port).rest()
            assert b"HTTP/1.1 429" in third
            assert b"too_many_connections" in third
            first[0].abort()
            await world.until(lambda: world.gate.limits.connections == 1)
            await (again := world.connect_proxy(HOST, server.port)).read(b" 200 ")
            again.abort()
            streams = [world.connect_proxy("evil.example", 443) for _ in range(40)]
            answers = [await stream.rest() for stream in streams]
            assert sum(b"rate_limited" in each for each in answers) >= 34
            await world.until(lambda: sum(each.code == "rate_limited" for each in world.records()) == 2)
            assert "more in the last second" in world.records("denied")[-1].text
            assert len(world.records()) < 20


def with_ech(whole: bytes) -> bytes:
    """The same hello with an Encrypted Client Hello extension at its end."""
    extra = bytes.fromhex("fe0d000400000000")
    body = whole[9:]
    at = 34
    at += 1 + body[at]
    at += 2 + int.from_bytes(body[at : at + 2])
    at += 1 + body[at]
    extensions = body[at + 2 :] + extra
    body = body[:at] + len(extensions).to_bytes(2) + extensions
    message = b"\x01" + len(body).to_bytes(3) + body
    return b"\x16\x03\x01" + len(message).to_bytes(2) + message
