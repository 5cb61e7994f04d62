"""Which addresses images may come from, and who may send us where."""

import ipaddress

import pytest

from cloche_server.images.outbound import Failed, Kind, Origin, kind_of, may_reach, origin_of
from cloche_server.images.settings import HostSettings, RegistrySettings
from cloche_server.images.tokens import Challenge, parse_challenges

KINDS: dict[str, Kind] = {
    "8.8.8.8": "public",
    "2606:4700::1111": "public",
    "10.1.2.3": "private",
    "172.16.0.1": "private",
    "192.168.1.1": "private",
    "100.64.0.1": "private",
    "198.18.0.1": "private",
    "fd12:3456::1": "private",
    "2001:db8::1": "private",
    "127.0.0.1": "loopback",
    "127.255.255.254": "loopback",
    "::1": "loopback",
    "::ffff:127.0.0.1": "loopback",
    "64:ff9b::7f00:1": "loopback",
    "2002:7f00:1::": "loopback",
    "169.254.169.254": "machine",
    "169.254.0.1": "machine",
    "fe80::1": "machine",
    "::ffff:169.254.169.254": "machine",
    "64:ff9b::a9fe:a9fe": "machine",
    "2002:a9fe:a9fe::1": "machine",
    "168.63.129.16": "machine",
    "100.100.100.200": "machine",
    "fd00:ec2::254": "machine",
    "0.0.0.0": "nowhere",
    "0.1.2.3": "nowhere",
    "::": "nowhere",
    "::ffff:0.0.0.0": "nowhere",
    "224.0.0.1": "nowhere",
    "ff02::1": "nowhere",
    "255.255.255.255": "nowhere",
    "240.0.0.1": "nowhere",
    "::ffff:10.0.0.1": "private",
    "64:ff9b::808:808": "public",
}
ONE, TWO = Origin("https", "one.example", 443), Origin("https", "two.example", 443)


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize("address", KINDS)
def test_whose_address_it_is(address: str) -> None:
    assert kind_of(ipaddress.ip_address(address)) == KINDS[address]


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize(
    ("kind", "first_kind", "may"),
    [
        ("public", "public", True),
        ("public", "private", True),
        ("public", "loopback", True),
        ("private", "public", False),
        ("loopback", "public", False),
        ("machine", "public", False),
        ("loopback", "private", False),
        ("private", "loopback", False),
        ("private", "private", True),
        ("loopback", "loopback", True),
        ("machine", "private", False),
        ("nowhere", "nowhere", False),
    ],
)
def test_who_may_send_us_where(kind: Kind, first_kind: Kind, may: bool) -> None:
    assert may_reach(RegistrySettings(), TWO, kind, ONE, first_kind) is may


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize("kind", ["public", "private", "loopback", "machine", "nowhere"])
def test_what_a_user_may_name_and_what_only_the_settings(kind: Kind) -> None:
    assert may_reach(RegistrySettings(), ONE, kind, ONE, kind) is (kind in ("public", "private", "loopback"))
    named = RegistrySettings(hosts={"one.example": HostSettings(redirects_to=("two.example",))})
    assert may_reach(named, ONE, kind, ONE, kind) is (kind != "nowhere")
    assert may_reach(named, TWO, kind, ONE, "public") is (kind != "nowhere")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://a.example/x", "a.example"),
        ("https://a.example:443/x", "a.example"),
        ("https://a.example:8443/x", "a.example:8443"),
        ("http://[::1]:5000", "[::1]:5000"),
        ("HTTP://A.Example", "a.example"),
    ],
)
def test_origins(url: str, name: str) -> None:
    assert origin_of(url).name == name


@pytest.mark.parametrize(
    "url", ["", "a.example", "//a.example", "ftp://a", "https://", "https://u@a", "https://a:0", "https://a:x"]
)
def test_what_is_no_origin(url: str) -> None:
    with pytest.raises(Failed):
        origin_of(url)


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (["Basic"], [Challenge("basic", {})]),
        (['Basic realm="a b"'], [Challenge("basic", {"realm": "a b"})]),
        (["Bearer realm=x,service=y"], [Challenge("bearer", {"realm": "x", "service": "y"})]),
        (['Bearer realm="a\\"b", Basic'], [Challenge("bearer", {"realm": 'a"b'}), Challenge("basic", {})]),
        (["Basic", 'bearer REALM = "x"'], [Challenge("basic", {}), Challenge("bearer", {"realm": "x"})]),
        (["Bearer realm=first,realm=second"], [Challenge("bearer", {"realm": "first"})]),
        (["realm=x"], []),
        ([""], []),
        ([], []),
    ],
)
def test_challenges(said: list[str], means: list[Challenge]) -> None:
    assert parse_challenges(said) == means
