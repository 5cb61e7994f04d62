"""Names, certificates and protocols on both sides; plain HTTP; what happens when something fails."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from tests.unit.interceptor import authorities
from tests.unit.interceptor.conftest import World
from tests.unit.interceptor.gate import ALLOWED, Gate, secret, wait_until
from tests.unit.interceptor.servers import Http1Server
from tests.unit.interceptor.talk import Talk, request, say


@pytest.mark.req("NET-5")
@pytest.mark.parametrize(("name", "code"), [("other.test", "sni_mismatch"), (None, "sni_missing")])
def test_another_name_in_the_handshake_is_refused(world: World, name: str | None, code: str) -> None:
    before = len(world.gate.of("dial"))
    client, connection = world.gate.open("api.test")
    context = ssl.create_default_context(cadata=world.lineage.cert)
    context.check_hostname = name is not None
    with pytest.raises(ssl.SSLError, match=r"(?i)unrecognized.name|EOF"):
        context.wrap_socket(client, server_hostname=name)
    assert world.gate.denial(connection)["code"] == code
    assert len(world.gate.of("dial")) == before


@pytest.mark.req("NET-5")
def test_what_is_not_tls_is_not_passed_on(world: World) -> None:
    before = len(world.gate.of("dial"))
    client, connection = world.gate.open("api.test")
    client.sendall(request("GET", "/"))
    assert b"200" not in client.recv(1000)
    wait_until(lambda: world.gate.of("closed", connection), "the end")
    assert len(world.gate.of("dial")) == before


def test_leaves_are_of_the_lineage_and_for_the_host(world: World) -> None:
    talk = Talk(world)
    assert isinstance(talk.socket, ssl.SSLSocket)
    certificate = talk.socket.getpeercert()
    assert certificate is not None
    assert certificate["subjectAltName"] == (("DNS", "api.test"),)
    other = world.gate.lineage("l2")
    client, _ = world.gate.open("api.test", lineage="l2")
    with pytest.raises(ssl.SSLCertVerificationError):
        authorities.client_context(world.lineage).wrap_socket(client, server_hostname="api.test")
    client, _ = world.gate.open("api.test", lineage="l2")
    authorities.client_context(other).wrap_socket(client, server_hostname="api.test").close()


def _server(world: World, host: str, leaf: authorities.Pair, *protocols: str) -> Http1Server:
    server = Http1Server(authorities.server_context(world.directory, leaf, *protocols))
    world.loop.run(server.start())
    world.gate.upstreams[(host, 443)] = server.address
    return server


@pytest.mark.req("NET-5")
@pytest.mark.parametrize("row", ["another authority", "another name"])
def test_a_server_that_cannot_prove_its_name_gets_nothing(world: World, row: str) -> None:
    root = authorities.authority("nobody") if row == "another authority" else world.root
    name = "rogue.test" if row == "another authority" else "elsewhere.test"
    server = _server(world, "rogue.test", authorities.leaf(root, name))
    reply = say(world, request("GET", "/", host="rogue.test"), "rogue.test")
    assert reply.status == 502
    assert b"x-cloche-denied: upstream_failed" in reply.head.lower()
    assert b"ertificate verify failed" in reply.body
    assert server.seen == []


def test_no_upstream_is_told_readably(world: World) -> None:
    world.gate.upstreams[("gone.test", 443)] = "the address 10.0.0.1 is not allowed"
    reply = say(world, request("GET", "/", host="gone.test"), "gone.test")
    assert reply.status == 502
    assert b"no answer from gone.test:443: the address 10.0.0.1 is not allowed" in reply.body
    assert world.gate.denial(reply.connection)["code"] == "upstream_failed"


@pytest.mark.parametrize(
    ("offers", "speaks", "chosen"),
    [
        (("h2", "http/1.1"), ("http/1.1",), "http/1.1"),
        (("h2", "http/1.1"), (), None),
        (("http/1.1",), ("h2", "http/1.1"), "http/1.1"),
        ((), ("h2", "http/1.1"), None),
    ],
)
def test_the_client_gets_the_protocol_that_the_server_chose(
    world: World, offers: tuple[str, ...], speaks: tuple[str, ...], chosen: str | None
) -> None:
    _server(world, "api2.test", authorities.leaf(world.root, "api2.test"), *speaks)
    client, _ = world.gate.open("api2.test")
    context = authorities.client_context(world.lineage, *offers)
    with context.wrap_socket(client, server_hostname="api2.test") as talk:
        assert talk.selected_alpn_protocol() == chosen
        talk.sendall(request("GET", "/", host="api2.test"))
        assert talk.recv(100).startswith(b"HTTP/1.1 200")


def test_a_server_that_closes_is_dialled_again(world: World) -> None:
    world.http1.closes.add(b"/close")
    talk = Talk(world)
    assert [talk.say(request("GET", path)).status for path in ("/", "/", "/close")] == [200, 200, 200]
    assert len(world.gate.of("dial", talk.connection)) == 1
    # The server's end may arrive a moment after its answer; a request that crosses it is answered 502.
    assert talk.say(request("GET", "/")).status in (200, 502)
    assert wait_until(lambda: len(world.gate.of("dial", talk.connection)) >= 1, "the dial")


@pytest.mark.req("NET-5")
def test_plain_http(world: World) -> None:
    how = {"port": 80, "tls": False}
    for target in ("/x", "http://plain.test/x", "http://plain.test:80/x"):
        reply = say(world, request("GET", target, host="plain.test"), "plain.test", **how)
        assert reply.status == 200
        assert reply.body.startswith(b"GET /x HTTP/1.1\r\n")
    for target, host in (
        ("http://other.test/x", "plain.test"),
        ("/x", "other.test"),
        ("http://plain.test/", "other.test"),
    ):
        assert say(world, request("GET", target, host=host), "plain.test", **how).status == 421


@pytest.mark.req("SEC-2")
def test_a_value_is_not_sent_without_tls_unless_the_port_is_named(world: World) -> None:
    token = secret("TOKEN", "real-value-of-it", "plain.test")
    sent = request("GET", "/", f"Authorization: Bearer {token['placeholder']}", host="plain.test")
    world.gate.sandbox("s4", token)
    assert say(world, sent, "plain.test", port=80, tls=False, sandbox="s4").status == 403
    world.gate.sandbox("s4", {**token, "hosts": ["plain.test:80"]})
    assert say(world, sent, "plain.test", port=80, tls=False, sandbox="s4").status == 200


def _curl(world: World, host: str, port: int, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    authority = world.directory / "curl.pem"
    authority.write_text(world.lineage.cert)
    command = [
        "curl",
        "-sS",
        "--max-time",
        "60",
        "--cacert",
        str(authority),
        "--connect-to",
        f"{host}:443:127.0.0.1:{port}",
    ]
    return subprocess.run([*command, *arguments], capture_output=True, check=False)


def test_curl_uploads_and_downloads_without_filling_memory(world: World, long_run: bool) -> None:
    size = (1 << 30) if long_run else (64 << 20)
    big = world.directory / "big"
    with big.open("wb") as file:
        file.truncate(size)
    world.http1.answers[b"/up"] = lambda seen: b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    piece = bytes(1 << 20)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    world.http1.answers[b"/down"] = [head, *([piece] * (size >> 20))]
    world.gate.sandbox("s5", secret("TOKEN", "real-value-of-it", "api.test"))
    port = world.gate.listen("api.test", sandbox="s5")
    up = _curl(world, "api.test", port, "-T", str(big), "https://api.test/up")
    assert up.stdout == b"ok", up.stderr
    down = _curl(world, "api.test", port, "-o", "/dev/null", "-w", "%{size_download}", "https://api.test/down")
    assert down.stdout == str(size).encode(), down.stderr
    peak = world.gate.peak_bytes()
    print(f"interceptor, {size >> 20} MiB up and down by HTTP/1: {peak / 1e6:.0f} MB at the most")
    assert peak <= 100_000_000


def test_curl_shows_why_it_was_denied(world: World) -> None:
    denied = {"allow": False, "status": 403, "code": "no_rule", "text": "no rule allows PUT", "rule": "default"}
    world.gate.verdict = lambda asked: denied
    try:
        port = world.gate.listen("api.test")
        found = _curl(world, "api.test", port, "-i", "-T", "/etc/hostname", "https://api.test/x")
    finally:
        world.gate.verdict = lambda asked: ALLOWED
    assert found.stdout.startswith(b"HTTP/1.1 403 Cloche: no rule allows PUT\r\n")
    assert found.stdout.endswith(b"Cloche: no rule allows PUT\n")


@pytest.mark.req("NET-9")
def test_all_ends_with_the_control_channel(interceptor_interpreter: Path, tmp_path: Path) -> None:
    gate = Gate(interceptor_interpreter, tmp_path / "log")
    gate.lineage("l1")
    gate.sandbox("s1")
    client, _ = gate.open("api.test")
    gate.channel.shutdown(socket.SHUT_RDWR)
    assert client.recv(100) == b""
    assert gate.process.wait(5) == 0


@pytest.mark.req("NET-9")
def test_a_killed_process_closes_every_connection(interceptor_interpreter: Path, tmp_path: Path) -> None:
    gate = Gate(interceptor_interpreter, tmp_path / "log")
    client, _ = gate.open("api.test")
    os.kill(gate.process.pid, signal.SIGKILL)
    assert client.recv(100) == b""
    gate.process.wait(5)


@pytest.mark.parametrize("bad", [b"\xff\xff\xff\xff", b"\x02\0\0\0[]", b"\x01\0\0\0{", b'\x0f\0\0\0{"t":"unknown"}'])
def test_a_broken_control_message_ends_the_process(interceptor_interpreter: Path, tmp_path: Path, bad: bytes) -> None:
    gate = Gate(interceptor_interpreter, tmp_path / "log")
    gate.channel.sendall(bad)
    assert gate.process.wait(5) == 0


def test_closed_connections_leave_nothing(world: World) -> None:
    def resident() -> int:
        return int(Path(f"/proc/{world.gate.process.pid}/statm").read_text().split()[1]) * 4096

    def many() -> None:
        for _ in range(64):
            say(world, request("GET", "/"))

    many()
    first = resident()
    for _ in range(3):
        many()
    assert resident() - first < 8 << 20
    descriptors = Path(f"/proc/{world.gate.process.pid}/fd")
    wait_until(lambda: len(list(descriptors.iterdir())) < 16, "descriptors to be closed")
