"""What commands are told of the gate, and what people are told by it."""

import pytest

from cloche_server.egress.attempt import Refused
from cloche_server.egress.environment import environment
from cloche_server.egress.own_addresses import OwnAddresses, _four
from cloche_server.egress.refusals import for_person, http
from cloche_server.egress.text import escaped


def test_each_slot_has_its_own_proxy_and_loopback_has_none() -> None:
    values = environment(3, trust=False)
    assert values["HTTPS_PROXY"] == values["http_proxy"] == "http://127.127.0.4:3128"
    assert values["CLOCHE_SOCKS"] == "socks5h://127.127.0.4:3128"
    assert values["NO_PROXY"] == "localhost,127.0.0.1,::1"
    assert "ALL_PROXY" not in values
    assert not [name for name in values if "CERT" in name or "CA" in name.split("_") or "JAVA" in name]
    with pytest.raises(AssertionError):
        environment(64, trust=False)


def test_trust_and_presets_come_on_top() -> None:
    values = environment(0, trust=True, presets={"PIP_INDEX_URL": "https://mirror.example/simple"})
    assert values["SSL_CERT_FILE"] == values["NODE_EXTRA_CA_CERTS"] == "/run/cloche/trust.pem"
    assert values["PIP_INDEX_URL"] == "https://mirror.example/simple"
    assert "/run/cloche/cacerts" in values["JAVA_TOOL_OPTIONS"]


@pytest.mark.req("NET-7")
@pytest.mark.parametrize(
    "hostile",
    ["a\r\nX-Evil: 1", "\x1b[31mred", "\u202edrow", "a\0b", "x" * 10_000, "é" * 500, "\ud800"],
)
def test_no_text_of_a_guest_breaks_a_refusal(hostile: str) -> None:
    refused = Refused("no_rule", f"No rule allows {hostile}.", hostile)
    answer = http(refused, sandbox="s1", host=hostile, port=443)
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert [line.partition(b" ")[0] for line in lines] == [
        b"HTTP/1.1", b"X-Cloche-Denied:", b"Content-Type:", b"Content-Length:", b"Connection:",
    ]  # fmt: skip
    assert len(lines[0]) < 300
    assert int(lines[3].split()[1]) == len(body)
    for text in (answer.decode(), for_person(refused, sandbox="s1", host=hostile, port=443)):
        assert all(each.isprintable() or each in "\r\n" for each in text)
        assert "\r\nX-Evil" not in text


def test_escaped_keeps_what_can_be_read() -> None:
    assert escaped("naïve 日本 \n\x1b") == "naïve 日本 \\n\\x1b"
    assert escaped("x" * 600) == "x" * 500


def test_the_nodes_own_addresses_are_found_and_loopback_is_left_to_its_own_kind() -> None:
    trie = "  |-- 0.0.0.0\n   /0 universe UNICAST\n  |-- 203.0.113.9\n   /32 host LOCAL\n  |-- 203.0.113.255\n   /32 link BROADCAST\n"
    assert {str(each) for each in _four(trie)} == {"203.0.113.9"}
    own = OwnAddresses()
    assert not any(each.is_loopback for each in own())
    assert own() is own(), "the kernel is not asked for every connection"
