"""Inside TLS that is looked into: what SNI, Host and :authority say must be one host, and no request hides in another."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cloche.client import Sandbox
from cloche.wire.egress import EgressRule
from tests.promises.egress.worlds import OTHER, WEB, World, needs_clients, needs_world, world_node
from tests.promises.nodes import RealNode

pytestmark = [needs_world, needs_clients, pytest.mark.timeout(120)]

RAW = """
import json, socket, ssl, sys
def tls(name, alpn):
    context = ssl.create_default_context()
    context.set_alpn_protocols([alpn])
    s = context.wrap_socket(socket.create_connection((name, 443)), server_hostname=name)
    s.settimeout(4)
    return s
def one(name, payload):
    try:
        with tls(name, "http/1.1") as s:
            s.sendall(payload.encode("latin-1"))
            got = b""
            while b"\\r\\n\\r\\n" not in got and (more := s.recv(65536)): got += more
            return got.split(b"\\r\\n")[0].decode("latin-1")
    except OSError as e: return e.__class__.__name__
print(json.dumps([one(sys.argv[1], payload) for payload in json.load(sys.stdin)]))
"""
FRAMES = """
import json, socket, ssl, sys
import h2.config, h2.connection, h2.events
def one(name, headers, body):
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    seen = []
    try:
        with context.wrap_socket(socket.create_connection((name, 443)), server_hostname=name) as s:
            s.settimeout(4)
            config = h2.config.H2Configuration(client_side=True, validate_outbound_headers=False, normalize_outbound_headers=False)
            c = h2.connection.H2Connection(config)
            c.initiate_connection()
            c.send_headers(1, [tuple(pair) for pair in headers], end_stream=not body)
            if body: c.send_data(1, body.encode(), end_stream=True)
            s.sendall(c.data_to_send())
            while data := s.recv(65536):
                for event in c.receive_data(data):
                    if isinstance(event, h2.events.ResponseReceived): return dict(event.headers)[":status"] if ":status" in dict(event.headers) else str(event.headers[0][1].decode())
                    if isinstance(event, (h2.events.StreamReset, h2.events.ConnectionTerminated)): return event.__class__.__name__
                s.sendall(c.data_to_send())
            return "closed"
    except OSError as e: return e.__class__.__name__
    except Exception as e: return "client: " + repr(e)
print(json.dumps([one(sys.argv[1], each["headers"], each.get("body", "")) for each in json.load(sys.stdin)]))
"""


@pytest.fixture(scope="module")
def box(node: RealNode) -> Iterator[Sandbox]:
    """Both hosts are served by one server at one address, as on a CDN; it may reach one of them, by GET and POST below /ok."""
    rules = [EgressRule(host=WEB, methods=["GET", "POST"], paths=["/ok", "/ok/**"])]
    with node.sandbox(image="clients", memory_mb=512, cpus=2, egress=rules) as made:
        yield made


def raw(box: Sandbox, *payloads: str) -> list[str]:
    result = box.run(["python3", "-c", RAW, WEB], stdin=json.dumps(payloads), timeout_s=60, check=True)
    answers: list[str] = json.loads(result.stdout)
    return answers


def frames(box: Sandbox, *requests: dict[str, object]) -> list[str]:
    result = box.run(["python3", "-c", FRAMES, WEB], stdin=json.dumps(requests), timeout_s=60, check=True)
    answers: list[str] = json.loads(result.stdout)
    return answers


def http2(
    *more: tuple[str, str], authority: str = WEB, path: str = "/ok", method: str = "GET"
) -> list[tuple[str, str]]:
    pseudo = [(":method", method), (":scheme", "https"), (":authority", authority), (":path", path)]
    return [*pseudo, *more]


def last(box: Sandbox) -> int:
    return max((record.seq for record in box.egress.records()), default=0)


@pytest.mark.req("NET-5")
def test_host_is_what_the_hello_said(box: Sandbox, earth: World) -> None:
    """The honest request arrives; the same with another Host, an absolute target, or none, does not."""
    earth.forget()
    answers = raw(
        box,
        f"GET /ok/honest HTTP/1.1\r\nHost: {WEB}\r\n\r\n",
        f"GET /ok/a HTTP/1.1\r\nHost: {OTHER}\r\n\r\n",
        f"GET https://{OTHER}/ok/b HTTP/1.1\r\nHost: {OTHER}\r\n\r\n",
        f"GET https://{OTHER}/ok/c HTTP/1.1\r\nHost: {WEB}\r\n\r\n",
        f"GET /ok/d HTTP/1.1\r\nHost: {WEB}\r\nHost: {OTHER}\r\n\r\n",
        "GET /ok/e HTTP/1.1\r\n\r\n",
        f"CONNECT {OTHER}:443 HTTP/1.1\r\nHost: {OTHER}:443\r\n\r\n",
    )
    assert "404" in answers[0], answers
    assert all(" 2" not in answer[:12] and "404" not in answer for answer in answers[1:]), answers
    assert [each["path"] for each in earth.requests()] == ["/ok/honest"]


@pytest.mark.req("NET-5")
def test_authority_is_what_the_hello_said(box: Sandbox, earth: World) -> None:
    earth.forget()
    answers = frames(
        box,
        {"headers": http2(path="/ok/honest")},
        {"headers": http2(authority=OTHER, path="/ok/a")},
        {"headers": http2(("host", OTHER), path="/ok/b")},
        {"headers": http2(authority=f"{WEB}@{OTHER}", path="/ok/c")},
        {"headers": [*http2(path="/ok/d"), (":authority", OTHER)]},
    )
    assert answers[0] == "404", answers
    assert all(not answer.startswith("2") and answer != "404" for answer in answers[1:]), answers
    assert [each["path"] for each in earth.requests()] == ["/ok/honest"]


HIDDEN = f"GET /ok/smuggled HTTP/1.1\r\nHost: {WEB}\r\n\r\n"


@pytest.mark.req("NET-5")
def test_nothing_is_smuggled_inside_tls(box: Sandbox, earth: World) -> None:
    """HTTP/1 that two parsers read differently."""
    earth.forget()
    before = last(box)
    start = f"POST /ok/outer HTTP/1.1\r\nHost: {WEB}\r\n"
    answers = raw(
        box,
        f"{start}Content-Length: {len(HIDDEN) + 5}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{HIDDEN}",
        f"{start}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n{HIDDEN}",
        f"{start}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n{HIDDEN}",
        f"{start}Content-Length: 0\r\nContent-Length: {len(HIDDEN)}\r\n\r\n{HIDDEN}",
        f"{start}X: a\r\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{HIDDEN}",
    )
    assert all(" 2" not in answer[:12] and "404" not in answer for answer in answers), answers
    assert [each["path"] for each in earth.requests() if "smuggled" in str(each)] == []
    assert [
        record.path for record in box.egress.records(after=before) if record.verdict == "allowed" and record.path
    ] == []


@pytest.mark.req("NET-5")
def test_nothing_is_smuggled_from_http2_into_http1(box: Sandbox, earth: World) -> None:
    """HTTP/2 that would become two requests in HTTP/1."""
    earth.forget()
    before = last(box)
    body = f"0\r\n\r\n{HIDDEN}"
    answers = frames(
        box,
        {"headers": http2(("transfer-encoding", "chunked"), method="POST", path="/ok/f"), "body": body},
        {"headers": http2(("content-length", "0"), method="POST", path="/ok/g"), "body": HIDDEN},
        {"headers": http2(("x", f"y\r\n\r\n{HIDDEN}"), path="/ok/h")},
        {"headers": http2(path=f"/ok/i HTTP/1.1\r\nHost: {OTHER}\r\n\r\nGET /ok/smuggled")},
        {"headers": http2(method="GET /ok/smuggled HTTP/1.1\r\nX: ", path="/ok/j")},
    )
    assert all(not answer.startswith("2") and answer != "404" for answer in answers), answers
    assert [each["path"] for each in earth.requests() if "smuggled" in str(each)] == []
    assert [
        record.path for record in box.egress.records(after=before) if record.verdict == "allowed" and record.path
    ] == []


@pytest.mark.req("NET-3")
@pytest.mark.req("POL-1")
def test_methods_and_paths_are_held(box: Sandbox, earth: World) -> None:
    """Spelt as it may be: what the server would take for another path is judged as that."""
    earth.forget()
    lines = (
        "GET /ok",
        "DELETE /ok",
        "PUT /ok/x",
        "GET /secret",
        "GET /ok/../secret",
        "GET /ok/%2e%2e/secret",
        "GET /ok/..;/secret",
        "GET //secret",
    )
    answers = raw(box, *(f"{line} HTTP/1.1\r\nHost: {WEB}\r\n\r\n" for line in lines))
    assert "404" in answers[0]
    assert all("403" in answer or "400" in answer for answer in answers[1:]), answers
    assert [each["path"] for each in earth.requests()] == ["/ok"]
    denied = [record for record in box.egress.records() if record.verdict == "denied" and record.method == "DELETE"]
    assert [(record.code, record.path) for record in denied] == [("method_not_allowed", "/ok")]
    assert all(record.policy == box.info().egress.policy for record in denied)


@pytest.mark.req("NET-5")
def test_intercept_always_closes_fronting(earth: World) -> None:
    """Where nobody looks in, another host of the same server can be reached; the organisation can close that for all."""
    script = (
        f"curl -sS -o /dev/null -w '%{{http_code}}' -k -H 'Host: {OTHER}' https://{WEB}/fronted;"
        f"curl -sS -o /dev/null -w ' %{{http_code}}' https://{WEB}/plain"
    )
    with (
        world_node(earth, "intercept: always\n") as node,
        node.sandbox(image="clients", memory_mb=512, egress=[WEB]) as box,
    ):
        earth.forget()
        fronted, plain = box.run(script, timeout_s=60).stdout.split()
        assert fronted in ("400", "403", "421")
        assert plain == "404"
        assert [each["path"] for each in earth.requests()] == ["/plain"]
        assert box.info().egress.fronting == "closed"


@pytest.mark.req("NET-5")
def test_where_nobody_looks_in_the_view_says_that_fronting_is_possible(node: RealNode) -> None:
    with node.sandbox(egress=[WEB]) as box:
        assert box.info().egress.fronting == "possible"
