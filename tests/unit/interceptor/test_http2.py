"""HTTP/2 through the real process: requests, trailers, refusals, and bounded memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.interceptor.conftest import World
from tests.unit.interceptor.gate import ALLOWED, ROOM, Gate, Message, secret
from tests.unit.interceptor.http2 import DEFECTIVE, Http2, h2_server, status

REAL = "real-value-of-the-token"
TOKEN = secret("TOKEN", REAL, "h2.test")
MEMORY_BYTES_MAX = 100_000_000


@pytest.fixture(scope="module")
def python(world: World, interceptor_interpreter: Path) -> Iterator[Path]:
    certificate = world.directory / "h2.pem"
    certificate.write_text(world.leaf.cert + world.leaf.key)
    with h2_server(interceptor_interpreter, certificate) as address:
        world.gate.upstreams[("h2.test", 443)] = address
        world.gate.sandbox("s2", TOKEN)
        yield interceptor_interpreter


@pytest.mark.req("SEC-2")
def test_a_placeholder_is_replaced_and_does_not_come_back(world: World, python: Path) -> None:
    with Http2(world, python, sandbox="s2") as client:
        answer = client.ask("POST", "/echo", ("authorization", f"Bearer {TOKEN['placeholder']}"), body="hello")
    assert status(answer) == 200
    assert REAL not in json.dumps(answer)
    said = json.loads(str(answer["body"]))
    assert said["body"] == "hello"
    assert ["authorization", f"Bearer {TOKEN['placeholder'][: len(REAL)]}"] in said["headers"]


@pytest.mark.req("SEC-3")
def test_trailers_pass_and_are_redacted(world: World, python: Path) -> None:
    with Http2(world, python, sandbox="s2") as client:
        answer = client.ask(
            "POST",
            "/trailers",
            ("authorization", f"Bearer {TOKEN['placeholder']}"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            body="message",
            trailers=[["x-sum", "7"]],
        )
    assert answer["body"] == "message"
    trailers = dict(map(tuple, answer["trailers"]))
    assert trailers["grpc-status"] == "0"
    assert trailers["grpc-message"] == f"Bearer {TOKEN['placeholder']}"
    assert trailers["x-seen-x-sum"] == "7"


def test_a_server_that_leaves_may_answer_first(world: World, python: Path) -> None:
    dials = len(world.gate.of("dial"))
    with Http2(world, python, sandbox="s2") as client:
        for _ in range(3):
            answer = client.ask("GET", "/leave")
            assert (status(answer), answer["size"]) == (200, 300_000)
        assert status(client.ask("GET", "/echo")) == 200
    assert len(world.gate.of("dial")) == dials + 4


def test_an_old_connection_is_ended_when_it_is_idle(world: World, python: Path, tmp_path: Path) -> None:
    """After 10,000 requests; here after 20."""
    gate = Gate(python, tmp_path / "log", DEFECTIVE, ROOM, "_no_long_life")
    try:
        lineage = gate.lineage("l1")
        gate.send({"t": "trust", "pem": world.root.cert})
        gate.sandbox("s1")
        gate.upstreams.update(world.gate.upstreams)
        good = 0
        with Http2(replace(world, gate=gate, lineage=lineage), python) as client:
            while status(answer := client.ask("GET", "/echo", wait_s=5)) == 200 and good < 100:
                good += 1
        assert good == 21
        assert answer.get("goaway") == 0 or "closed" in answer or "failed" in answer
    finally:
        gate.close()


def test_many_requests_share_one_upstream(world: World, python: Path) -> None:
    dials = len(world.gate.of("dial"))
    with Http2(world, python) as client:
        assert [status(client.ask("GET", f"/{n}")) for n in range(20)] == [200] * 20
    assert len(world.gate.of("dial")) == dials + 1


@pytest.mark.req("SEC-3")
@pytest.mark.parametrize("where", ["header", "path", "small body", "large body", "trailer"])
def test_a_placeholder_elsewhere_is_blocked_and_told(world: World, python: Path, where: str) -> None:
    held = str(TOKEN["placeholder"])
    alerts = len(world.gate.of("alert"))
    with Http2(world, python, sandbox="s2") as client:
        match where:
            case "header":
                answer = client.ask("GET", "/echo", ("x-other", held))
            case "path":
                answer = client.ask("GET", f"/{held}")
            case "small body":
                answer = client.ask("POST", "/echo", ("content-length", str(len(held))), body=held)
            case "large body":
                answer = client.ask("POST", "/echo", body="x" * 50_000 + held + "y" * 10_000)
            case _:
                answer = client.ask("POST", "/echo", body="x", trailers=[["x-sum", held]])
        assert status(answer) == 403, answer
        assert "placeholder of TOKEN" in answer["body"]
        assert status(client.ask("GET", "/echo")) == 200
    assert len(world.gate.of("alert")) == alerts + 1


def _peak(world: World, what: str) -> None:
    peak = world.gate.peak_bytes()
    print(f"interceptor, {what}: {peak / 1e6:.0f} MB at the most")
    assert peak <= MEMORY_BYTES_MAX


def _size(long_run: bool) -> int:
    return (1 << 30) if long_run else (64 << 20)


@pytest.mark.req("NET-5")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sandbox", ["s1", "s2"])
def test_a_large_upload_and_download_are_not_kept_in_memory(
    world: World, python: Path, long_run: bool, sandbox: str
) -> None:
    size = _size(long_run)
    with Http2(world, python, sandbox=sandbox) as client:
        assert client.ask("POST", "/size", upload=size, wait_s=300)["body"] == str(size)
        assert client.ask("GET", f"/big?{size}", wait_s=300)["size"] == size
    _peak(world, f"{size >> 20} MiB up and down")


def test_a_client_that_never_opens_its_window_costs_no_memory(world: World, python: Path, long_run: bool) -> None:
    with Http2(world, python, sandbox="s2") as client:
        answer = client.ask("GET", f"/big?{_size(long_run)}", window=False, wait_s=2)
    assert answer["late"]
    assert answer["size"] <= 1 << 16
    _peak(world, "a client that takes nothing")


def test_a_large_upload_that_is_denied_is_not_kept(world: World, python: Path, long_run: bool) -> None:
    denied: Message = {"allow": False, "status": 403, "code": "no_rule", "text": "not this one", "rule": "default"}
    world.gate.verdict = lambda asked: denied
    try:
        with Http2(world, python, sandbox="s2") as client:
            answer = client.ask("POST", "/size", upload=_size(long_run), wait_s=100)
    finally:
        world.gate.verdict = lambda asked: ALLOWED
    assert status(answer) == 403
    assert "not this one" in answer["body"]
    _peak(world, "a denied upload")


AUTHORITY_ROWS = {
    "another authority": [[":authority", "other.test"]],
    "another host beside the right authority": [[":authority", "h2.test"], ["host", "other.test"]],
    "no authority": [],
    "another port": [[":authority", "h2.test:8443"]],
    "userinfo": [[":authority", "h2.test@other.test"]],
}


@pytest.mark.req("NET-5")
@pytest.mark.parametrize("row", AUTHORITY_ROWS)
def test_an_authority_that_is_not_the_host_is_refused(world: World, python: Path, row: str) -> None:
    asked = len(world.gate.of("request"))
    with Http2(world, python) as client:
        answer = client.raw([[":method", "GET"], [":scheme", "https"], [":path", "/echo"], *AUTHORITY_ROWS[row]])
    assert status(answer) in (0, 421)
    assert status(answer) == 421 or "goaway" in answer or "closed" in answer or "reset" in answer
    assert len(world.gate.of("request")) == asked


FORM_ROWS = {
    "CONNECT": [[":method", "CONNECT"], [":authority", "h2.test"]],
    "extended CONNECT": [
        [":method", "CONNECT"],
        [":protocol", "websocket"],
        [":scheme", "https"],
        [":path", "/"],
        [":authority", "h2.test"],
    ],
    "a line end in a value": [*"", ["x-a", "b\r\nHost: other.test"]],
    "a NUL in a value": [["x-a", "b\0c"]],
    "a line end in the path": [[":path", "/ HTTP/1.1\r\nHost: other.test\r\n\r\n"]],
    "connection": [["connection", "close"]],
    "transfer-encoding": [["transfer-encoding", "chunked"]],
    "upgrade": [["upgrade", "h2c"]],
    "a name in capitals": [["X-Upper", "1"]],
    "a colon in a name": [["x:y", "1"]],
    "a wrong length": [["content-length", "5"]],
    "plain http": [[":scheme", "http"]],
    "a dot segment": [[":path", "/a/%2e%2e/b"]],
}


@pytest.mark.req("NET-5")
@pytest.mark.parametrize("row", FORM_ROWS)
def test_a_request_that_could_be_another_one_downstream_is_refused(world: World, python: Path, row: str) -> None:
    fields = dict(map(tuple, FORM_ROWS[row]))
    first = {":method": "GET", ":scheme": "https", ":path": "/echo", ":authority": "h2.test"}
    if ":method" in fields:
        headers = FORM_ROWS[row]
    else:
        merged = {**first, **fields}
        headers = [[name, value] for name, value in merged.items()]
    asked = len(world.gate.of("request"))
    with Http2(world, python) as client:
        answer = client.raw(headers)
    assert status(answer) in (0, 400, 405, 421)
    assert len(world.gate.of("request")) == asked


def test_a_reset_by_the_server_is_told(world: World, python: Path) -> None:
    with Http2(world, python) as client:
        answer = client.ask("GET", "/reset")
        assert status(answer) == 502
        assert "no answer from h2.test:443" in answer["body"]
        assert status(client.ask("GET", "/echo")) == 200
