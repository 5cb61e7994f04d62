"""Addresses that nobody is let through to, in every form in which they can be written."""

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.policy.addresses import METADATA, TEXTS, embedded, refusal

REFUSED = {
    "loopback": ["127.0.0.1", "127.255.255.254", "::1"],
    "unspecified": ["0.0.0.0", "0.1.2.3", "::"],
    "link_local": ["169.254.0.1", "169.254.255.255", "fe80::1", "febf::1"],
    "private": ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.0.1", "fc00::1", "fd12:3456::1", "fec0::1"],
    "cgnat": ["100.64.0.1", "100.127.255.255"],
    "multicast": ["224.0.0.1", "239.255.255.255", "ff02::1", "ff0e::1"],
    "broadcast": ["255.255.255.255"],
    "documentation": ["192.0.2.1", "198.51.100.1", "203.0.113.9", "2001:db8::1", "3fff::1"],
    "reserved": [
        "192.0.0.1",
        "192.88.99.1",
        "198.18.0.1",
        "198.19.255.255",
        "240.0.0.1",
        "254.0.0.1",
        "100::1",
        "2001:2::1",
        "2001:10::1",
        "2001:20::1",
        "4000::1",
        "5f00::1",
        "8000::1",
        "64:ff9b:1::808:808",
        "::808:808",
        "::ffff:0:808:808",
        "200::1",
        "f000::1",
    ],
    "metadata": [
        "169.254.169.254",
        "169.254.170.2",
        "169.254.170.23",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "169.254.169.253",
        "169.254.0.23",
        "fd00:ec2::254",
        "fd00:ec2::1",
        "fd20:ce::254",
        "fd00:c1::a9fe:a9fe",
        "fd00:42::42",
        "fd00:a9fe:a9fe::1",
        "fd00:100::100:200",
    ],
}
PUBLIC = ["8.8.8.8", "1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255",
    "128.0.0.1", "172.15.255.255", "172.32.0.0", "169.253.255.255", "169.255.0.0", "192.0.1.1", "192.167.255.255",
    "198.17.255.255", "198.20.0.0", "223.255.255.255", "168.63.129.15", "2606:4700::1111", "2a00:1450::1", "2001:4860::8888",
]  # fmt: skip


def forms(address: IPv4Address) -> dict[str, IPv6Address]:
    """Every known way to carry an IPv4 address in an IPv6 address."""
    number = int(address)
    return {
        "mapped": IPv6Address((0xFFFF << 32) | number),
        "compatible": IPv6Address(number),
        "translated": IPv6Address((0xFFFF << 48) | number),
        "nat64": IPv6Address((0x0064FF9B << 96) | number),
        "nat64_local": IPv6Address((0x0064FF9B0001 << 80) | number),
        "6to4": IPv6Address((0x2002 << 112) | (number << 80) | 1),
        "teredo_server": IPv6Address((0x20010000 << 96) | (number << 64) | (0x08080808 ^ 0xFFFFFFFF)),
        "teredo_client": IPv6Address((0x20010000 << 96) | (0x08080808 << 64) | (number ^ 0xFFFFFFFF)),
        "isatap": IPv6Address((0x2606470000000000 << 64) | (0x00005EFE << 32) | number),
        "isatap_global": IPv6Address((0x2606470000000000 << 64) | (0x02005EFE << 32) | number),
    }


@pytest.mark.req("NET-4")
@pytest.mark.parametrize(("code", "text"), [(code, text) for code, texts in REFUSED.items() for text in texts])
def test_refused(code: str, text: str) -> None:
    assert refusal(ip_address(text)) == code
    assert code in TEXTS


@pytest.mark.req("NET-4")
@pytest.mark.parametrize("text", PUBLIC)
def test_public(text: str) -> None:
    assert refusal(ip_address(text)) is None


@pytest.mark.req("NET-4")
@pytest.mark.parametrize(
    "text", [text for texts in REFUSED.values() for text in texts if "." in text and text not in ("0.0.0.0", "0.1.2.3")]
)
@pytest.mark.parametrize("form", list(forms(IPv4Address("8.8.8.8"))))
def test_a_refused_address_stays_so_in_every_form(text: str, form: str) -> None:
    carrier = forms(IPv4Address(text))[form]
    assert refusal(carrier) is not None
    assert IPv4Address(text) in embedded(carrier)


@pytest.mark.req("NET-4")
@pytest.mark.parametrize(
    "text",
    [
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::",
        "2002:a9fe:a9fe::1",
        "::a9fe:a9fe",
        "2001:0:a9fe:a9fe::1",
        "::ffff:a9fe:a9fe",
        "::ffff:0:a9fe:a9fe",
        "64:ff9b:1::a9fe:a9fe",
    ],
)
def test_metadata_by_its_other_names(text: str) -> None:
    assert refusal(ip_address(text)) == "metadata"


@pytest.mark.parametrize("form", ["mapped", "nat64", "6to4", "isatap"])
def test_a_public_address_may_be_carried(form: str) -> None:
    assert refusal(forms(IPv4Address("8.8.8.8"))[form]) is None


def test_own_addresses_also_in_other_forms() -> None:
    own = frozenset({IPv4Address("198.41.0.4"), IPv6Address("2606:4700::5")})
    assert refusal(IPv4Address("198.41.0.4"), own) == "own"
    assert refusal(IPv6Address("2606:4700::5"), own) == "own"
    assert refusal(IPv6Address("::ffff:198.41.0.4"), own) == "own"
    assert refusal(IPv4Address("198.41.0.5"), own) is None


def test_a_zone_is_link_local() -> None:
    assert refusal(IPv6Address("2606:4700::1%eth0")) == "link_local"


@pytest.mark.req("NET-4")
@given(st.ip_addresses())
def test_never_wider_than_the_standard_library(address: IPv4Address | IPv6Address) -> None:
    """What ipaddress says is not global is refused here too, and so are multicast and metadata."""
    inner = embedded(address) if isinstance(address, IPv6Address) else ()
    if address in METADATA or address.is_multicast or not (address.is_global or inner):
        assert refusal(address) is not None
    for each in inner:
        if refusal(each) is not None:
            assert refusal(address) is not None


@pytest.mark.req("NET-4")
@given(st.ip_addresses(v=4), st.sampled_from(sorted(forms(IPv4Address("8.8.8.8")))))
def test_a_form_is_never_better_than_what_it_carries(address: IPv4Address, form: str) -> None:
    if refusal(address) is not None:
        assert refusal(forms(address)[form]) is not None
