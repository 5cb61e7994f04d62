"""Hostile names, addresses and first bytes, sent raw from inside a real sandbox. What is refused never left the node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cloche.client import Sandbox
from cloche.wire.egress import EgressLimits
from tests.promises.egress.inside import connect, get, hello, socks, talk
from tests.promises.egress.worlds import EVIL, OTHER, WEB, World, needs_world
from tests.promises.nodes import RealNode

pytestmark = [needs_world, pytest.mark.timeout(120)]

FAST = EgressLimits(attempts_per_s=10_000)
METADATA = "169.254.169.254"
NUMBERS = (
    "2852039166",
    "0xA9FEA9FE",
    "0251.0376.0251.0376",
    "0xa9.0xfe.0xa9.0xfe",
    "169.254.43518",
    "127.1",
    "1.2.3.4.5",
)
ADDRESSES = (
    METADATA,
    "127.0.0.1",
    "0.0.0.0",
    "10.0.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "[::1]",
    f"[::ffff:{METADATA}]",
    "[::ffff:a9fe:a9fe]",
    "[64:ff9b::a9fe:a9fe]",
    "[2002:a9fe:a9fe::1]",
    "[2001:0:4136:e378:8000:63bf:5601:5601]",
    "[fe80::1]",
    "[fd00:ec2::254]",
)
NAMES = {
    "endings": (f"evil{WEB}", f"{WEB}.{EVIL}", f".{WEB}", f"{WEB}..", f"*.{WEB}", ""),
    "userinfo": (f"{WEB}@{EVIL}", f"user:password@{WEB}"),
    "borders": (
        f"{EVIL}\\.{WEB}",
        f"{EVIL}#.{WEB}",
        f"{EVIL}/.{WEB}",
        f"{EVIL}%2f.{WEB}",
        f"{EVIL}%00.{WEB}",
    ),
    "look-alikes": ("w\u0435b.test", "\uff57\uff45\uff42.test", "xn--web-.test"),
    "long labels": (f"{'a' * 64}.{WEB}", f"{'a.' * 127}{WEB}"),
}


@pytest.fixture(scope="module")
def box(node: RealNode) -> Iterator[Sandbox]:
    """May reach `web.test` and everything below it, and no more."""
    with node.sandbox(egress=[WEB, f"*.{WEB}"], egress_limits=FAST) as made:
        yield made


def codes(box: Sandbox, after: int) -> list[tuple[str, str]]:
    return [(record.verdict, record.code) for record in box.egress.records(after=after)]


def last(box: Sandbox) -> int:
    return max((record.seq for record in box.egress.records()), default=0)


@pytest.mark.req("NET-4")
@pytest.mark.parametrize("kind", ["numbers", "addresses"])
def test_raw_addresses_and_all_their_spellings_are_refused(box: Sandbox, earth: World, kind: str) -> None:
    """Through CONNECT and as a URL: none of them names a rule's host, and no spelling gets another judgement."""
    before = last(box)
    forms, wanted = (NUMBERS, {"bad_name"}) if kind == "numbers" else (ADDRESSES, {"needs_name", "no_rule"})
    said = talk(box, *(connect(form) for form in forms), *(get(f"http://{form}/") for form in forms))
    for form, one in zip((*forms, *forms), said, strict=True):
        assert one.status in (400, 403), (form, one)
        assert one.code in {*wanted, "bad_request"}, (form, one)
    assert {verdict for verdict, _ in codes(box, before)} == {"denied"}
    assert earth.evil.is_untouched, str(earth.evil)


@pytest.mark.req("NET-3")
@pytest.mark.req("NET-4")
@pytest.mark.parametrize("kind", NAMES)
def test_names_that_only_look_allowed_are_refused(box: Sandbox, earth: World, kind: str) -> None:
    earth.forget()
    earth.dns.asked.clear()
    names = NAMES[kind]
    as_url = [name for name in names if name and "/" not in name and "#" not in name]
    tries = (*map(connect, names), *(get(f"http://{name}/echo", "Connection: close") for name in as_url))
    said = talk(box, *tries, wait_s=1.5)
    for name, one in zip((*names, *as_url), said, strict=True):
        assert one.status in (400, 403), (name, one)
    assert earth.requests() == []
    assert earth.dns.asked == []
    assert earth.evil.is_untouched, str(earth.evil)


@pytest.mark.req("NET-3")
def test_one_name_in_its_other_spellings_is_the_same(box: Sandbox, earth: World) -> None:
    earth.forget()
    names = (WEB.upper(), f"{WEB}.")
    said = talk(box, *(get(f"http://{name}/echo", "Connection: close") for name in names))
    assert [one.status for one in said] == [200, 200], said
    assert {record.host for record in box.egress.records() if record.verdict == "allowed"} == {WEB}


@pytest.mark.req("NET-3")
def test_hostile_socks_names_are_refused(box: Sandbox, earth: World) -> None:
    earth.dns.asked.clear()
    names = (
        f"{EVIL}\0.{WEB}".encode(),
        f"{EVIL}\r\n.{WEB}".encode(),
        f"{EVIL}%.{WEB}".encode(),
        f"{EVIL}\xff.{WEB}".encode("latin-1"),
        b"a" * 255,
        EVIL.encode(),
        b"",
    )
    for name, one in zip(names, talk(box, *(socks(name) for name in names)), strict=True):
        assert len(one.data) < 4 or one.data[3] != 0, (name, one)
        assert one.end != "open", (name, one)
    assert earth.evil.is_untouched, str(earth.evil)
    assert earth.dns.asked == []


@pytest.mark.req("NET-5")
@pytest.mark.parametrize("code", ["sni_mismatch", "sni_missing", "not_tls"])
def test_what_tls_says_must_agree(box: Sandbox, earth: World, code: str) -> None:
    """A tunnel to an allowed host carries TLS that names it, and nothing else."""
    before = last(box)
    accepted = len(earth.requests())
    firsts = {
        "sni_mismatch": hello(OTHER),
        "sni_missing": hello(None),
        "not_tls": b"GET / HTTP/1.1\r\nHost: web.test\r\n\r\n",
    }
    (one,) = talk(box, [connect(WEB), firsts[code]], pause_s=0.1)
    head, _, rest = one.data.partition(b"\r\n\r\n")
    assert b"200" not in head.split(b"\r\n")[0] or b"ServerHello" not in rest, one
    assert one.end != "open", one
    assert not rest.startswith(b"\x16"), "the server answered"
    assert [found for verdict, found in codes(box, before) if verdict == "denied"] == [code]
    assert len(earth.requests()) == accepted


@pytest.mark.req("NET-5")
def test_an_honest_hello_is_answered_by_the_server(box: Sandbox) -> None:
    (honest,) = talk(box, [connect(WEB), hello(WEB)], pause_s=0.1, wait_s=1)
    assert honest.data.partition(b"\r\n\r\n")[2].startswith(b"\x16"), honest


@pytest.mark.req("NET-5")
def test_tls_by_name_must_agree_as_well(box: Sandbox) -> None:
    """Without a proxy: the synthetic address stands for one name, and TLS to it must say that name."""
    before = last(box)
    said = talk(box, hello(OTHER), hello(None), b"\x00" * 64, to=(WEB, 443))
    assert all(not one.data.startswith(b"\x16") and one.end != "open" for one in said), said
    found = [code for verdict, code in codes(box, before) if verdict == "denied"]
    assert found == ["sni_mismatch", "sni_missing", "not_tls"]


DISAGREEING: dict[str, bytes | list[bytes]] = {
    "Host is another": get(f"http://{WEB}/a", f"Host: {OTHER}"),
    "Host is there twice": get(f"http://{WEB}/b", f"Host: {WEB}", f"Host: {OTHER}"),
    "absolute form to another, second request": [
        get(f"http://{WEB}/ok-1"),
        get(f"http://{OTHER}/c", f"Host: {OTHER}"),
    ],
    "another host in a tunnel": [connect(WEB, 80), get(f"http://{OTHER}/d")],
    "another Host in a tunnel": [connect(WEB, 80), f"GET /e HTTP/1.1\r\nHost: {OTHER}\r\n\r\n".encode()],
    "CONNECT in a tunnel": [connect(WEB, 80), connect(EVIL)],
    "origin form to the proxy": f"GET /f HTTP/1.1\r\nHost: {OTHER}\r\n\r\n".encode(),
    "userinfo": get(f"http://{WEB}@{OTHER}/g"),
}


@pytest.mark.req("NET-5")
@pytest.mark.parametrize("how", DISAGREEING)
def test_what_http_says_must_agree(box: Sandbox, earth: World, how: str) -> None:
    """Host and target are one; a tunnel to port 80 is no way to another host; no CONNECT inside a tunnel."""
    earth.forget()
    (one,) = talk(box, DISAGREEING[how], pause_s=0.2)
    final = one.data.rpartition(b"HTTP/1.")[2].split(b" ")
    assert final[0] == b"" or final[1] in (b"400", b"403"), one
    assert one.end != "open", one
    assert {each["path"] for each in earth.requests()} <= {"/ok-1"}
    assert earth.evil.is_untouched, str(earth.evil)


HIDDEN = "GET /smuggled HTTP/1.1\r\nHost: other.test\r\n\r\n"
SMUGGLED = {
    "a length and an encoding": f"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{HIDDEN}",
    "an unknown encoding": f"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n{HIDDEN}",
    "two encodings": "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a blank before a colon": f"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n{HIDDEN}",
    "two lengths": "Content-Length: 5\r\nContent-Length: 50\r\n\r\nhello",
    "a length with a sign": "Content-Length: +5\r\n\r\nhello",
    "a folded line": "Content-Length: 5\r\n Transfer-Encoding: chunked\r\n\r\nhello",
    "a bare LF": "Content-Length: 5\r\nX: a\nTransfer-Encoding: chunked\r\n\r\nhello",
    "a bare CR": "X: a\rTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello",
    "a NUL": "X: a\0b\r\n\r\n",
    "a chunk with an extension": "Transfer-Encoding: chunked\r\n\r\n5;\nx\r\nhello\r\n0\r\n\r\n",
    "a chunk without end": "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello\r\n0\r\n\r\n",
    "another upgrade": "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: something\r\n\r\n",
}


@pytest.mark.req("NET-5")
@pytest.mark.parametrize("how", SMUGGLED)
def test_no_request_is_smuggled(box: Sandbox, earth: World, how: str) -> None:
    """Whatever two parsers could read differently is refused; nothing that was hidden in it arrives."""
    earth.forget()
    attack = f"POST http://{WEB}/outer HTTP/1.1\r\nHost: {WEB}\r\n{SMUGGLED[how]}".encode("latin-1")
    (one,) = talk(box, attack, wait_s=2)
    assert one.status in (400, 403), one
    assert {each["path"] for each in earth.requests(kind="request")} <= set()


@pytest.mark.req("NET-5")
def test_endless_headers_are_cut_off(box: Sandbox, earth: World) -> None:
    earth.forget()
    many = b"GET http://web.test/ HTTP/1.1\r\nHost: web.test\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(20_000))
    long = b"GET http://web.test/ HTTP/1.1\r\nHost: web.test\r\nX: " + b"y" * 300_000
    target = b"GET http://web.test/" + b"y" * 300_000
    for attack in (many, long, target):
        (one,) = talk(box, attack)
        assert one.status in (400, 0), one.data[:200]
        assert one.end != "open"
    assert earth.requests() == []


@pytest.mark.req("NET-3")
def test_an_allowed_host_at_another_port_is_refused(box: Sandbox) -> None:
    said = talk(box, *(connect(WEB, port) for port in (22, 25, 853, 2375, 8443)))
    assert [one.code for one in said] == ["port_not_allowed"] * 5
