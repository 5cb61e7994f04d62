"""Known failures of others (rows N1 to N7 and N11), from the bytes that a guest sends to the decision.

What needs a name server, a socket or a TLS server is in tests/promises/egress; this is the part that is decided without.
"""

import ssl

import pytest

from cloche_server.egress.fields import BadRequest
from cloche_server.egress.heads import Head, RequestReader
from cloche_server.egress.hello import HelloParser, NotTls
from cloche_server.egress.socks import BadSocks, Connect, SocksReader
from cloche_server.policy.addresses import refusal
from cloche_server.policy.decide import Policy
from cloche_server.policy.model import Effect, Target
from cloche_server.policy.names import target
from tests.unit.policy.policies import policy

ALLOWED = policy("allowed.com", "*.allowed.org")
METADATA = (
    "169.254.169.254",
    "[::ffff:169.254.169.254]",
    "[64:ff9b::a9fe:a9fe]",
    "[2002:a9fe:a9fe::1]",
    "[fd00:ec2::254]",
)
WIDE = policy(*METADATA, "127.0.0.1", "[2001:0:a9fe:a9fe::1]")
"""A careless operator named them; their addresses are judged all the same."""


def outcome(mine: Policy, wanted: Target) -> str:
    decision = mine.connect(wanted)
    if decision.effect is Effect.ALLOW and wanted.address is not None:
        return refusal(wanted.address) or "public"
    return decision.code


def by_connect(mine: Policy, authority: str) -> str:
    reader = RequestReader()
    reader.feed(f"CONNECT {authority} HTTP/1.1\r\n\r\n".encode())
    try:
        head = reader.next_event()
    except BadRequest as refused:
        return refused.reason
    assert isinstance(head, Head)
    return outcome(mine, target(head.host, head.port))


def by_url(mine: Policy, url: str, host: str) -> str:
    reader = RequestReader()
    reader.feed(f"GET {url} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin-1"))
    try:
        head = reader.next_event()
    except BadRequest as refused:
        return refused.reason
    assert isinstance(head, Head)
    wanted = target(head.host, head.port)
    decided = outcome(mine, wanted)
    return mine.request(wanted, head.method, head.path).code if decided == "allowed" else decided


def by_socks(mine: Policy, name: bytes, port: int = 443) -> str:
    reader = SocksReader()
    reader.feed(b"\x05\x01\x00" + b"\x05\x01\x00\x03" + bytes([len(name)]) + name + port.to_bytes(2))
    try:
        events = [reader.next_event(), reader.next_event()]
    except BadSocks as refused:
        return refused.reason
    asked = events[1]
    assert isinstance(asked, Connect)
    return outcome(mine, asked.target)


@pytest.mark.req("NET-2")
@pytest.mark.parametrize("authority", ["example.com:443", "example.com:80", "8.8.8.8:443"])
def test_n1_an_empty_list_is_not_everything(authority: str) -> None:
    assert by_connect(policy(), authority) in ("no_rule", "needs_name")
    assert by_socks(policy(), b"example.com") == "no_rule"
    assert by_url(policy(), "http://example.com/", "example.com") == "no_rule"


@pytest.mark.req("NET-3")
@pytest.mark.parametrize(
    "name",
    [
        b"evil.com\0.allowed.com",
        b"evil.com\0.allowed.org",
        b"allowed.com\r\n",
        b"allowed.com\r\nX: y",
        b"allowed.com\n",
        b"evil.com%00.allowed.org",
        b"evil.com%2e.allowed.org",
        "evil.com\u3002allowed.org".encode(),
        "аllowed.com".encode(),
        b"\xff.allowed.org",
        b"a" * 64 + b".allowed.org",
        b"a." * 122 + b"allowed.org",
        b".allowed.org",
        b"evil.com/.allowed.org",
        b"evil.com#.allowed.org",
        b"evil.com?.allowed.org",
        b"evil.com:80.allowed.org",
        b"user@x.allowed.org",
        b" x.allowed.org",
    ],
)
def test_n2_names_that_are_none(name: bytes) -> None:
    assert by_socks(ALLOWED, name) == "bad_host"


@pytest.mark.req("NET-3")
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("allowed.com", "allowed"),
        ("ALLOWED.com.", "allowed"),
        ("x.Allowed.Org", "allowed"),
        ("evilallowed.com", "no_rule"),
        ("allowed.com.evil.com", "no_rule"),
        ("evilallowed.org", "no_rule"),
        ("x.evilallowed.org", "no_rule"),
        ("allowed.org", "no_rule"),
        ("allowed.org.evil.com", "no_rule"),
        ("xn--llowed-2nf.com", "no_rule"),
        ("xn--allowed-.com", "bad_host"),
        ("allowed.com..", "bad_host"),
        ("allowed.com@evil.com", "userinfo"),
        ("evil.com@allowed.com", "userinfo"),
    ],
)
def test_n3_only_true_matches(name: str, code: str) -> None:
    assert by_connect(ALLOWED, f"{name}:443") == code
    assert by_url(ALLOWED, f"http://{name}/", name) == code


@pytest.mark.req("NET-4")
@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("2852039166", "bad_host"),
        ("0xA9FEA9FE", "bad_host"),
        ("0251.0376.0251.0376", "bad_host"),
        ("0xa9.254.169.254", "bad_host"),
        ("169.254.43518", "bad_host"),
        ("127.1", "bad_host"),
        ("0", "bad_host"),
        ("017700000001", "bad_host"),
        ("169.254.169.254", "metadata"),
        ("[::ffff:169.254.169.254]", "metadata"),
        ("[::ffff:a9fe:a9fe]", "metadata"),
        ("[64:ff9b::a9fe:a9fe]", "metadata"),
        ("[2002:a9fe:a9fe::1]", "metadata"),
        ("[2001:0:a9fe:a9fe::1]", "metadata"),
        ("[fd00:ec2::254]", "metadata"),
        ("127.0.0.1", "loopback"),
        ("[fe80::1%25eth0]", "bad_host"),
    ],
)
def test_n4_metadata_in_every_form(host: str, code: str) -> None:
    assert by_connect(WIDE, f"{host}:443") == code
    assert by_url(WIDE, f"http://{host}/latest/meta-data/", host) == code
    assert by_connect(ALLOWED, f"{host}:443") in ("bad_host", "needs_name")


@pytest.mark.req("NET-4")
@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("127.0.0.1", "loopback"),
        ("10.1.2.3", "private"),
        ("100.64.0.1", "cgnat"),
        ("::1", "loopback"),
        ("8.8.8.8", None),
    ],
)
def test_n5_each_address_of_an_answer_is_judged(answer: str, code: str | None) -> None:
    address = target(answer, 443).address
    assert address is not None
    assert refusal(address) == code


def sni(name: str | None) -> str | None:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    found = HelloParser().feed(outgoing.read())
    assert found is not None
    return found.sni


@pytest.mark.req("NET-5")
def test_n6_the_hello_tells_its_name_or_that_it_has_none() -> None:
    assert by_connect(ALLOWED, "93.184.216.34:443") == "needs_name"
    assert sni("allowed.com") == "allowed.com"
    assert sni("Evil.com") == "evil.com"
    assert sni(None) is None
    with pytest.raises(NotTls):
        HelloParser().feed(b"GET / HTTP/1.1\r\n")
    assert by_url(ALLOWED, "http://allowed.com/", "evil.com") == "host_mismatch"
    assert by_url(ALLOWED, "http://evil.com/", "allowed.com") == "host_mismatch"


@pytest.mark.req("NET-5")
def test_n7_fronting_is_said_or_closed() -> None:
    assert ALLOWED.fronting == "possible"
    assert policy({"host": "allowed.com", "intercept": True}).fronting == "closed"
    assert policy("allowed.com", secrets=["allowed.com"]).fronting == "closed"
    assert policy({"host": "allowed.com", "paths": ["/simple/**"]}).fronting == "closed"


@pytest.mark.req("NET-3")
@pytest.mark.parametrize(
    ("authority", "code"),
    [
        ("allowed.com:443", "allowed"),
        ("allowed.com:22", "port_not_allowed"),
        ("allowed.com:2375", "port_not_allowed"),
        ("allowed.com:8443", "port_not_allowed"),
        ("evil.com:443", "no_rule"),
        ("allowed.com:0", "bad_host"),
        ("allowed.com:65536", "bad_host"),
        ("allowed.com:443:22", "bad_host"),
        ("allowed.com", "bad_host"),
    ],
)
def test_n11_each_hop_and_port_anew(authority: str, code: str) -> None:
    assert by_connect(ALLOWED, authority) == code


@pytest.mark.req("NET-3")
def test_n11_an_upgrade_is_a_request_like_any_other() -> None:
    mine = policy({"host": "allowed.com", "paths": ["/chat"]})
    reader = RequestReader()
    reader.feed(b"GET /admin HTTP/1.1\r\nHost: allowed.com\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    head = reader.next_event()
    assert isinstance(head, Head)
    assert head.upgrade
    assert mine.request(target(head.host, head.port), head.method, head.path).code == "path_not_allowed"
