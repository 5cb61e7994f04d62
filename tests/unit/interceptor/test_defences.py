"""Each defence, switched off in the real process: then the attack gets through, so the tests of it can fail."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.interceptor import authorities
from tests.unit.interceptor.conftest import World
from tests.unit.interceptor.gate import ROOM, Gate, secret
from tests.unit.interceptor.http2 import DEFECTIVE, Http2, h2_server
from tests.unit.interceptor.servers import Http1Server
from tests.unit.interceptor.talk import Talk, request, say

REAL = "real-value-of-the-token"
TOKEN = secret("TOKEN", REAL, "api.test")
PH = str(TOKEN["placeholder"])


def _bare_line_end(world: World, python: Path) -> bool:
    return say(world, b"GET / HTTP/1.1\nHost: api.test\r\n\r\n").status == 200


def _another_host(world: World, python: Path) -> bool:
    return say(world, request("GET", "/", host="other.test")).status == 200


def _placeholder_in_a_header(world: World, python: Path) -> bool:
    return say(world, request("GET", "/", f"X-Other: {PH}"), sandbox="s2").status == 200


def _placeholder_in_a_body(world: World, python: Path) -> bool:
    body = base64.b64encode(PH.encode()) * 3
    return say(world, request("POST", "/", body=body), sandbox="s2").status == 200


def _echoed_value(world: World, python: Path) -> bool:
    sent = request("GET", "/", f"Authorization: Bearer {PH}")
    return REAL.encode() in say(world, sent, sandbox="s2").raw


def _another_name(world: World, python: Path) -> bool:
    client, _ = world.gate.open("api.test")
    context = ssl.create_default_context(cadata=world.lineage.cert)
    context.check_hostname = False
    try:
        talk = context.wrap_socket(client, server_hostname="other.test")
        talk.sendall(request("GET", "/"))
        return talk.recv(100).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def _full_memory(world: World, python: Path) -> bool:
    certificate = world.directory / "h2.pem"
    certificate.write_text(world.leaf.cert + world.leaf.key)
    with h2_server(python, certificate) as address:
        world.gate.upstreams[("h2.test", 443)] = address
        with Http2(world, python) as client:
            client.ask("GET", f"/big?{128 << 20}", window=False, wait_s=3)
    return world.gate.peak_bytes() > 100_000_000


def _long_head(world: World, python: Path) -> bool:
    talk = Talk(world)
    talk.send(b"GET / HTTP/1.1\r\nHost: api.test\r\n")
    try:
        for _ in range(300):
            talk.send(b"X-A: " + b"b" * 10_000 + b"\r\n")
    except OSError:
        return False
    talk.close()
    return True


def _unproven_server(world: World, python: Path) -> bool:
    leaf = authorities.leaf(authorities.authority("nobody"), "rogue.test")
    server = Http1Server(authorities.server_context(world.directory, leaf))
    world.loop.run(server.start())
    world.gate.upstreams[("rogue.test", 443)] = server.address
    return say(world, request("GET", "/", host="rogue.test"), "rogue.test").status == 200


def _hanging(world: World, python: Path) -> bool:
    talk = Talk(world, sandbox="s-nobody")  # of whom nothing is known: looking at his request fails
    talk.socket.settimeout(3)
    talk.send(request("GET", "/"))
    try:
        talk.reply(until_end=True)
    except TimeoutError:
        return True
    return False


ROWS: dict[str, tuple[str, Callable[[World, Path], bool]]] = {
    "bare line ends": ("_no_raw_head", _bare_line_end),
    "Host agrees": ("_no_request_form", _another_host),
    "placeholders in heads": ("_no_look", _placeholder_in_a_header),
    "placeholders in bodies": ("_no_body_look", _placeholder_in_a_body),
    "redaction": ("_no_redaction", _echoed_value),
    "the name in TLS": ("_no_name_check", _another_name),
    "windows": ("_no_bounds", _full_memory),
    "heads": ("_no_head_bound", _long_head),
    "verified servers": ("_no_verification", _unproven_server),
    "failing closed": ("_no_failing_closed", _hanging),
}


@pytest.mark.req("SEC-3")
@pytest.mark.req("NET-5")
@pytest.mark.parametrize("row", ROWS)
def test_without_the_defence_the_attack_gets_through(
    world: World, interceptor_interpreter: Path, tmp_path: Path, row: str
) -> None:
    defect, attack = ROWS[row]
    world.gate.sandbox("s2", TOKEN)
    assert not attack(world, interceptor_interpreter)
    broken = Gate(interceptor_interpreter, tmp_path / "log", DEFECTIVE, ROOM, defect)
    try:
        lineage = broken.lineage("l1")
        broken.send({"t": "trust", "pem": world.root.cert})
        broken.sandbox("s1")
        broken.sandbox("s2", TOKEN)
        broken.upstreams.update(world.gate.upstreams)
        assert attack(replace(world, gate=broken, lineage=lineage), interceptor_interpreter)
    finally:
        broken.close()
