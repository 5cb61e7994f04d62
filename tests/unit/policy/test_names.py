"""Names of hosts: one normal form, and everything that could pass for a host and is none."""

import contextlib
import socket
import time
from ipaddress import ip_address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cloche_server.policy.names import BadName, host_and_port, normal_host, same_host, target

LONG_LABEL = "a" * 63
LONGEST = ".".join([LONG_LABEL] * 3 + ["a" * 61])


@pytest.mark.req("NET-3")
@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("allowed.com", "allowed.com"),
        ("ALLOWED.com.", "allowed.com"),
        ("Allowed.COM", "allowed.com"),
        ("localhost", "localhost"),
        ("a_b.example.com", "a_b.example.com"),
        ("_dmarc.example.com", "_dmarc.example.com"),
        ("1.example.com", "1.example.com"),
        ("0xff.example.com", "0xff.example.com"),
        ("3com.com", "3com.com"),
        ("r3---sn-x.example.com", "r3---sn-x.example.com"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("faß.example", "xn--fa-hia.example"),
        ("ａｌｌｏｗｅｄ.com", "allowed.com"),
        ("allowed。com", "allowed.com"),
        (LONGEST, LONGEST),
        ("1.2.3.4", "1.2.3.4"),
        ("[2001:DB8::1]", "2001:db8::1"),
        ("2001:db8:0:0:0:0:0:1", "2001:db8::1"),
    ],
)
def test_normal_form(text: str, host: str) -> None:
    assert normal_host(text)[0] == host


@pytest.mark.req("NET-3")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (".", "empty"),
        ("allowed.com..", "empty"),
        (".allowed.com", "empty"),
        ("a..com", "empty"),
        (LONGEST + "a", "too_long"),
        ("a" * 5000, "too_long"),
        ("a" * 64 + ".com", "label_too_long"),
        ("ü" * 64 + ".com", "label_too_long"),
        ("ü" * 63 + ".com", "idn"),
        ("evil.com\0.allowed.com", "bad_character"),
        ("allowed.com\r\n", "bad_character"),
        ("allowed.com\n", "bad_character"),
        ("allowed.com\r", "bad_character"),
        (" allowed.com", "bad_character"),
        ("allowed.com ", "bad_character"),
        ("allowed.com\t", "bad_character"),
        ("allowed%2ecom", "bad_character"),
        ("allowed.com%00", "bad_character"),
        ("allowed.com/", "bad_character"),
        ("allowed.com\\evil.com", "bad_character"),
        ("allowed.com?x", "bad_character"),
        ("allowed.com#x", "bad_character"),
        ("*.allowed.com", "bad_character"),
        ("-allowed.com", "bad_character"),
        ("allowed-.com", "bad_character"),
        ("allowed.com@evil.com", "userinfo"),
        ("evil.com:x@allowed.com", "userinfo"),
        ("[::1", "bad_character"),
        ("::1]", "bad_character"),
        ("[127.0.0.1]", "bad_character"),
        ("[::1]x", "bad_character"),
        ("allowed.com:443", "bad_character"),
        ("fe80::1%eth0", "zone"),
        ("[fe80::1%25eth0]", "zone"),
        ("::1%lo", "zone"),
        ("\u202eallowed.com", "idn"),
        ("a\u200dllowed.com", "idn"),
        ("\ud800.com", "idn"),
        ("xn--allowed-.com", "bad_character"),
        ("xn--.com", "bad_character"),
        ("xn--99999999999.com", "idn"),
        ("xn--a.com", "idn"),
        ("％００.com", "bad_character"),
        ("allowed.com／evil", "bad_character"),
        ("allowed.com＠evil.com", "userinfo"),
    ],
)
def test_what_is_no_host(text: str, reason: str) -> None:
    with pytest.raises(BadName) as refused:
        normal_host(text)
    assert refused.value.reason == reason


@pytest.mark.req("NET-4")
@pytest.mark.parametrize(
    "text",
    [
        "2852039166",
        "0xA9FEA9FE",
        "0XA9FEA9FE",
        "025177524776",
        "0251.0376.0251.0376",
        "0251.254.169.254",
        "0xA9.0xFE.0xA9.0xFE",
        "169.254.43518",
        "169.16689662",
        "127.1",
        "127.0.1",
        "0",
        "0x",
        "0x7f.1",
        "1",
        "127.0.0.01",
        "127.0.0.256",
        "999.1.1.1",
        "1.2.3.4.5",
        "1.2.3",
        "a.1.2.3",
        "example.0x7f",
        "１２７.１",
        "①②⑦.1",
        "2852039166.",
    ],
)
def test_numbers_that_are_no_plain_address(text: str) -> None:
    """What inet_aton or a browser would take for an address, but for its one usual form."""
    with pytest.raises(BadName) as refused:
        normal_host(text)
    assert refused.value.reason == "numeric"


@pytest.mark.req("NET-4")
@given(st.text(alphabet="0123456789abcdefxX.", min_size=1, max_size=24))
@example("127.0.0.1")
def test_whatever_the_c_library_takes_for_an_address_is_one_or_refused(text: str) -> None:
    try:
        packed = socket.inet_aton(text)
    except OSError:
        return
    with contextlib.suppress(BadName):
        assert normal_host(text)[1] == ip_address(packed)


@pytest.mark.req("NET-3")
@given(st.text(max_size=80) | st.from_regex(r"[a-zA-Z0-9.\-_\[\]:%xn]{1,40}", fullmatch=True))
@example("xn--bcher-kva.example")
@example("FE80::1")
def test_normalising_twice_is_normalising_once(text: str) -> None:
    try:
        host, address = normal_host(text)
    except BadName:
        return
    assert normal_host(host) == (host, address)
    assert host.isascii()
    assert host == host.lower()
    assert len(host) <= 253
    assert same_host(text, host)


@pytest.mark.req("NET-3")
@pytest.mark.parametrize(
    "look_alike",
    ["аllowed.com", "allоwed.com", "allowed.соm", "ｅvil.com", "xn--llowed-cye.com", "allowed.com.evil.com"],
)
def test_look_alikes_are_other_hosts(look_alike: str) -> None:
    assert not same_host(look_alike, "allowed.com")


@pytest.mark.parametrize("port", [0, 65536, -1, "", "0", "0443", "+443", "443 ", "4_4", "65536", "١", "99999999"])
def test_bad_ports(port: int | str) -> None:
    with pytest.raises(BadName) as refused:
        target("a.com", port)
    assert refused.value.reason == "port"


def test_targets() -> None:
    assert target("A.com.", "443").host == "a.com"
    assert target("[::1]", 80).address == ip_address("::1")
    assert target("1.2.3.4", 80).address == ip_address("1.2.3.4")
    assert target("a.com", 65535).port == 65535


@pytest.mark.parametrize(
    ("text", "default", "parts"),
    [
        ("a.com:443", None, ("a.com", 443)),
        ("a.com", 80, ("a.com", 80)),
        ("[::1]:80", None, ("[::1]", 80)),
        ("[::1]", 80, ("[::1]", 80)),
    ],
)
def test_host_and_port(text: str, default: int | None, parts: tuple[str, int]) -> None:
    assert host_and_port(text, default) == parts


@pytest.mark.parametrize(
    "text", ["a.com", "a.com:", ":80", "::1", "::1:80", "a:b:80", "a.com:80:80", "[::1]80", "", "[::1]:"]
)
def test_not_host_and_port(text: str) -> None:
    with pytest.raises(BadName):
        normal_host(host_and_port(text)[0])


def test_no_name_takes_long() -> None:
    """Some characters are looked at again for each other one of their label."""
    started = time.perf_counter()
    for char in "\u0660\u30fb漢ß\u0378":
        for text in (char * 1000, char * 250, ".".join([char * 63] * 4)):
            with pytest.raises(BadName):
                normal_host(text)
    assert time.perf_counter() - started < 0.5


def test_a_message_has_nothing_of_the_hostile_text() -> None:
    with pytest.raises(BadName) as refused:
        normal_host("\x1b]0;owned\x07.com")
    assert str(refused.value).isprintable()
    assert "owned" not in str(refused.value)
