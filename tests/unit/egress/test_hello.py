"""TLS ClientHellos: real ones of real clients in any pieces, crafted ones, and bytes that are none."""

import shutil
import socket
import ssl
import subprocess
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche_server.egress.hello import HELLO_BYTES_MAX, Hello, HelloParser, NotTls


def by_python(name: str | None, protocols: Sequence[str] = ()) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def by_program(argv: list[str]) -> bytes:
    """What a program sends first to a server that says nothing. `PORT` in an argument becomes the server's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        server.settimeout(10)
        with subprocess.Popen(
            [each.replace("PORT", port) for each in argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                client, _ = server.accept()
                with client:
                    client.settimeout(10)
                    data = b""
                    while len(data) < 5 or len(data) < 5 + int.from_bytes(data[3:5]):
                        part = client.recv(65536)
                        assert part
                        data += part
                    return data
            finally:
                process.kill()


def extension(kind: int, body: bytes) -> bytes:
    return kind.to_bytes(2) + len(body).to_bytes(2) + body


def names(*each: bytes, kind: int = 0) -> bytes:
    body = b"".join(bytes([kind]) + len(name).to_bytes(2) + name for name in each)
    return extension(0, len(body).to_bytes(2) + body)


def hello(*extensions: bytes, body: bytes | None = None, version: bytes = b"\x03\x03") -> bytes:
    """A ClientHello message, without its records."""
    if body is None:
        every = b"".join(extensions)
        body = version + b"r" * 32 + b"\0" + b"\0\x02\x13\x01" + b"\x01\0" + len(every).to_bytes(2) + every
    return b"\x01" + len(body).to_bytes(3) + body


def records(message: bytes, size: int = 16384) -> bytes:
    parts = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2) + part for part in parts)


def parsed(data: bytes, size: int | None = None) -> Hello | None:
    parser = HelloParser()
    for at in range(0, len(data), size or len(data) or 1):
        found = parser.feed(data[at : at + (size or len(data))])
        if found is not None:
            return found
    return None


@pytest.mark.req("NET-5")
@pytest.mark.parametrize(
    ("name", "protocols"), [("api.example.com", ()), ("API.Example.com", ("h2", "http/1.1")), (None, ("h2",))]
)
def test_of_python(name: str | None, protocols: Sequence[str]) -> None:
    found = parsed(by_python(name, protocols))
    assert found == Hello(name and name.lower(), False, tuple(protocols))


@pytest.mark.req("NET-5")
def test_of_openssl() -> None:
    argv = [
        "openssl",
        "s_client",
        "-connect",
        "127.0.0.1:PORT",
        "-servername",
        "Api.Example.com",
        "-alpn",
        "h2,http/1.1",
    ]
    assert parsed(by_program(argv)) == Hello("api.example.com", False, ("h2", "http/1.1"))
    assert parsed(by_program([*argv[:4], "-noservername"])) == Hello(None, False, ())
    assert parsed(by_program([*argv[:6], "-tls1_2"])) == Hello("api.example.com", False, ())


@pytest.mark.req("NET-5")
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_of_curl() -> None:
    argv = ["curl", "-sk", "--noproxy", "*", "--connect-to", "::127.0.0.1:PORT", "https://api.example.com/"]
    found = parsed(by_program(argv))
    assert found is not None
    assert found.sni == "api.example.com"
    assert "http/1.1" in found.alpn


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 17, 100])
def test_in_pieces(size: int) -> None:
    data = by_python("api.example.com", ["h2"])
    assert parsed(data, size) == parsed(data) == Hello("api.example.com", False, ("h2",))


def test_cut_at_every_byte() -> None:
    data = by_python("api.example.com")
    for at in range(1, len(data)):
        parser = HelloParser()
        assert parser.feed(data[:at]) is None
        assert parser.feed(data[at:]) == Hello("api.example.com", False, ())


@pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
def test_over_several_records(size: int) -> None:
    message = hello(names(b"api.example.com"))
    assert parsed(records(message, size)) == Hello("api.example.com", False, ())
    assert parsed(records(message, size), 1) == Hello("api.example.com", False, ())


def test_what_follows_is_not_looked_at() -> None:
    data = by_python("api.example.com")
    assert parsed(data + b"\xff" * 100) == parsed(data)


@pytest.mark.req("NET-5")
def test_extensions() -> None:
    grease = extension(0x0A0A, b""), extension(0xFAFA, b"\0")
    assert parsed(records(hello(*grease, names(b"a.example")))) == Hello("a.example", False, ())
    assert parsed(records(hello(names(b"a.example"), extension(0xFE0D, b"\0" * 40)))) == Hello("a.example", True, ())
    assert parsed(records(hello(extension(0xFFCE, b"x")))) == Hello(None, True, ())
    assert parsed(records(hello())) == Hello(None, False, ())
    alpn = extension(16, b"\0\x07\x02h2\x02\x1a\x1a\x00"[:-1])
    with pytest.raises(NotTls):
        parsed(records(hello(alpn)))
    assert parsed(records(hello(extension(16, b"\0\x06\x02h2\x02\x1a\x1a")))) == Hello(None, False, ("h2", "\x1a\x1a"))
    no_extensions = b"\x03\x01" + b"r" * 32 + b"\0" + b"\0\x02\x13\x01" + b"\x01\0"
    assert parsed(records(hello(body=no_extensions))) == Hello(None, False, ())


START = b"\x03\x03" + b"r" * 32


@pytest.mark.req("NET-5")
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "not_tls"),
        (b"\x05\x01\x00", "not_tls"),
        (b"SSH-2.0-x\r\n", "not_tls"),
        (b"\x80\x2e\x01\x03\x01", "not_tls"),
        (b"\x16\x02", "not_tls"),
        (b"\x16\x03\x05", "not_tls"),
        (b"\x17\x03\x03\x00\x01\x00", "not_tls"),
        (b"\x16\x03\x01\x00\x00", "record_length"),
        (b"\x16\x03\x01\x40\x01", "record_length"),
        (b"\x16\x03\x01\xff\xff", "record_length"),
        (b"\x16\x03\x01\x00\x01\x02", "not_hello"),
        (b"\x16\x03\x01\x00\x04\x01\xff\xff\xff", "too_long"),
        (b"\x16\x03\x01\x00\x04\x01\x01\x00\x00", "too_long"),
        (records(hello(body=b"")), "length"),
        (records(hello(body=START)), "length"),
        (records(hello(body=b"\x02\x00" + b"r" * 32)), "version"),
        (records(hello(body=START + b"\x21" + b"s" * 33)), "session"),
        (records(hello(body=START + b"\0\0\0\x01\0")), "ciphers"),
        (records(hello(body=START + b"\0\0\x03abc\x01\0")), "ciphers"),
        (records(hello(body=START + b"\0\0\x02ab\0")), "compression"),
        (records(hello(body=START + b"\0\0\x02ab\x01\0\xff\xff")), "length"),
        (records(hello(body=START + b"\0\0\x02ab\x01\0\0\0x")), "length"),
        (records(hello(body=START + b"\0\0\x02ab\x01\0\0\x03abc")), "length"),
        (records(hello() + b"x"), "trailing"),
        (records(hello(names(b"a.example"), names(b"b.example"))), "extension_twice"),
        (records(hello(names(b"a.example"), extension(1, b""), extension(1, b""))), "extension_twice"),
        (records(hello(names(b"a.example", b"b.example"))), "two_sni"),
        (records(hello(names(b"a.example", kind=1))), "sni_kind"),
        (records(hello(names())), "length"),
        (records(hello(extension(0, b""))), "length"),
        (records(hello(extension(0, b"\0\x0c\0\0\x09a.exampleX"))), "length"),
        (records(hello(names(b""))), "bad_sni"),
        (records(hello(names("bücher.example".encode()))), "bad_sni"),
        (records(hello(names(b"evil.example\0.a.example"))), "bad_sni"),
        (records(hello(names(b"a.example\r\n"))), "bad_sni"),
        (records(hello(names(b"1.2.3.4"))), "bad_sni"),
        (records(hello(names(b"2852039166"))), "bad_sni"),
        (records(hello(names(b"a" * 300))), "bad_sni"),
        (records(hello(names(b"*.example"))), "bad_sni"),
        (records(hello(extension(16, b"\0\x03\x05h2"))), "length"),
        (records(hello(extension(16, b"\0\x01\0"))), "alpn"),
        (records(hello(extension(16, b"\0\xc8" + b"\x01x" * 100))), "alpn"),
        (records(hello(*[extension(1000 + n, b"") for n in range(300)])), "too_many_extensions"),
    ],
)
def test_refused(data: bytes, reason: str) -> None:
    for size in (None, 1, 7):
        with pytest.raises(NotTls) as refused:
            parsed(data, size)
        assert refused.value.reason == reason


def test_a_trailing_dot_and_case_are_the_same_name() -> None:
    assert parsed(records(hello(names(b"A.Example.")))) == Hello("a.example", False, ())


def held(parser: HelloParser) -> int:
    return len(parser._head) + len(parser._message)


def test_the_longest_and_one_more() -> None:
    padding = HELLO_BYTES_MAX - len(hello(names(b"a.example"), extension(21, b""))) - 1
    data = records(hello(names(b"a.example"), extension(21, b"\0" * padding)))
    parser = HelloParser()
    assert parser.feed(data) == Hello("a.example", False, ())
    assert held(parser) <= HELLO_BYTES_MAX
    parser = HelloParser()
    with pytest.raises(NotTls):
        parser.feed(records(hello(body=b"\0" * HELLO_BYTES_MAX)))
    assert held(parser) <= HELLO_BYTES_MAX


@given(st.binary(max_size=400), st.integers(1, 50), st.booleans())
def test_any_bytes(data: bytes, size: int, framed: bool) -> None:
    """Nothing but NotTls, and never more than the limit is held."""
    parser = HelloParser()
    data = records(b"\x01" + data, 30) if framed else data
    try:
        for at in range(0, len(data), size):
            parser.feed(data[at : at + size])
            assert held(parser) <= HELLO_BYTES_MAX
    except NotTls:
        pass


REAL = by_python("api.example.com", ["h2", "http/1.1"])


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(REAL) - 1), st.integers(0, 255)), max_size=6), st.integers(1, 600))
def test_a_real_one_with_damage(damage: list[tuple[int, int]], size: int) -> None:
    data = bytearray(REAL)
    for at, value in damage:
        data[at] = value
    outcomes = []
    for pieces in (None, size):
        try:
            outcomes.append(parsed(bytes(data), pieces))
        except NotTls as refused:
            outcomes.append(refused.reason)
    assert outcomes[0] == outcomes[1]


def test_an_endless_one_ends() -> None:
    """Small records without end, of a message that says it is too long by a little."""
    parser = HelloParser()
    message = b"\x01\x00\xff\xf0" + b"\0" * 100_000
    pieces = [b"\x16\x03\x01\x00\x0a" + message[at : at + 10] for at in range(0, len(message), 10)]
    with pytest.raises(NotTls):
        list(map(parser.feed, pieces))
    assert held(parser) <= HELLO_BYTES_MAX
