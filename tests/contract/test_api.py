"""The shape of HTTP, over real sockets and a backend in memory: who is let in, how errors look, how streams go on."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from cloche_server.api import streams
from cloche_server.api.caller import ApiKey, TcpConfig
from tests.unit.api.served import Served, served

WAIT_S_MAX = 10.0


class Line(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(self._path)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as one:
        yield one


def ask(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], Any]:
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    sent = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request(method, path, content, sent)
    answer = connection.getresponse()
    data = answer.read()
    is_json = "json" in answer.headers.get("content-type", "")
    return (
        answer.status,
        {name.lower(): value for name, value in answer.headers.items()},
        json.loads(data) if is_json else data,
    )


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S_MAX
    while not true():
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.01)


@contextlib.contextmanager
def as_user(uid: int, path: Path) -> Iterator[Line]:
    """A connection made by another local user: SO_PEERCRED is what the kernel saw at connect."""
    line = Line(path)
    before = os.geteuid()
    os.seteuid(uid)
    try:
        line.connect()
    finally:
        os.seteuid(before)
    with contextlib.closing(line):
        yield line


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def open_node() -> Iterator[Served]:
    """In a directory that every user may pass; pytest's own is for one user only."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        with served(Path(folder)) as one:
            yield one


@needs_root
@pytest.mark.req("ISO-3")
def test_a_user_sees_only_his_own(open_node: Served) -> None:
    node = open_node
    with as_user(1001, node.socket) as first, as_user(1002, node.socket) as second:
        _, _, box = ask(first, "POST", "/v1/sandboxes", {"name": "mine"})
        assert box["owner"] == "uid:1001"
        for who in (second, first):
            forged = {"x_forwarded_for": "127.0.0.1", "x_cloche_uid": "1001", "authorization": "Bearer uid:1001"}
            status, _, listed = ask(who, "GET", "/v1/sandboxes?all=true", **forged)
            assert status == 200
            assert [one["id"] for one in listed["sandboxes"]] == ([box["id"]] if who is first else [])
        for method, path in [
            ("GET", ""),
            ("DELETE", ""),
            ("GET", "/commands"),
            ("GET", "/files?path=/x"),
            ("GET", "/tree?path=/x"),
        ]:
            status, _, problem = ask(second, method, f"/v1/sandboxes/{box['id']}{path}")
            assert (status, problem["code"]) == (404, "not_found"), path
        assert ask(second, "DELETE", "/v1/sandboxes")[2] == {"sandboxes": 0}
    with contextlib.closing(Line(node.socket)) as root:
        assert len(ask(root, "GET", "/v1/sandboxes")[2]["sandboxes"]) == 1


@pytest.mark.req("UX-6")
@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nowhere", None, 404, "not_found"),
        ("GET", "/v1/sandboxes/", None, 404, "not_found"),
        ("PATCH", "/v1/sandboxes", None, 405, "method_not_allowed"),
        ("POST", "/v1/sandboxes", b"{", 400, "invalid_request"),
        ("POST", "/v1/sandboxes", {"nonsense": 1}, 400, "invalid_request"),
        ("POST", "/v1/sandboxes", {"ttl_s": -1}, 400, "invalid_request"),
        ("POST", "/v1/sandboxes", {"image": "crash"}, 500, "internal"),
        ("POST", "/v1/sandboxes", {"image": "full"}, 503, "overloaded"),
        ("POST", "/v1/sandboxes/box/commands", {"argv": []}, 400, "invalid_request"),
        ("POST", "/v1/sandboxes/box/commands", {"argv": ["crash"]}, 500, "internal"),
        ("POST", "/v1/sandboxes/box/commands", b"\xff", 400, "invalid_request"),
        ("POST", "/v1/sandboxes/box/commands", b"[" * 100_000, 400, "invalid_request"),
        ("GET", "/v1/sandboxes/box/commands/none", None, 404, "not_found"),
        ("GET", "/v1/sandboxes/box/commands/c?wait_s=nan", None, 400, "invalid_request"),
        ("GET", "/v1/sandboxes/box/commands/c/output?from=x", None, 400, "invalid_request"),
        ("GET", "/v1/sandboxes/box/commands/c/output?fd=7", None, 400, "invalid_request"),
        ("GET", "/v1/sandboxes/box/commands/c/output?follow=maybe", None, 400, "invalid_request"),
        ("GET", "/v1/sandboxes/box/commands/c/output?follow=true", None, 404, "not_found"),
        ("GET", "/v1/sandboxes/box/files?path=relative", None, 400, "invalid_path"),
        ("GET", "/v1/sandboxes/box/files?path=/none", None, 404, "path_not_found"),
        ("PUT", "/v1/sandboxes/box/files?path=/x&mode=9", b"x", 400, "invalid_request"),
        ("GET", "/v1/events?limit=0", None, 400, "invalid_request"),
    ],
)
def test_every_error_is_a_problem(node: Served, method: str, path: str, body: Any, status: int, code: str) -> None:
    with contextlib.closing(Line(node.socket)) as line:
        ask(line, "POST", "/v1/sandboxes", {"name": "box"})
        answered, headers, problem = ask(line, method, path, body)
        assert (answered, problem["code"], problem["status"]) == (status, code, status)
        assert headers["content-type"] == "application/problem+json"
        assert problem["fix"]
        assert problem["detail"]
        assert "secret" not in json.dumps(problem)
        assert "Traceback" not in json.dumps(problem)
        assert ("retry-after" in headers) == (code == "overloaded")
        assert ask(line, "GET", "/healthz")[0] == 200  # the same connection goes on


@pytest.mark.req("UX-6")
def test_what_is_not_http_gets_a_problem_too(node: Served) -> None:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(20)
        line.connect(str(node.socket))
        line.sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        head, _, body = line.recv(65536).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["code"] == "invalid_request"
        assert line.recv(100) == b""


def test_a_body_that_is_too_large_is_refused(node: Served) -> None:
    with contextlib.closing(Line(node.socket)) as line:
        status, _, problem = ask(line, "POST", "/v1/sandboxes", b'"' + b"x" * (9 * 1024 * 1024) + b'"')
        assert (status, problem["code"]) == (413, "too_large")


@pytest.mark.req("LIF-1")
@pytest.mark.req("EXE-4")
def test_a_repeat_with_the_same_key_answers_the_same(node: Served) -> None:
    with contextlib.closing(Line(node.socket)) as line:
        boxes = {ask(line, "POST", "/v1/sandboxes", {}, idempotency_key="k1")[2]["id"] for _ in range(3)}
        [box] = boxes
        path = f"/v1/sandboxes/{box}/commands"
        assert (
            len({ask(line, "POST", path, {"argv": ["exit", "0"]}, idempotency_key="k2")[2]["id"] for _ in range(3)})
            == 1
        )
        assert ask(line, "POST", path, {"argv": ["exit", "0"]}, idempotency_key="k" * 200)[0] == 400


def start(line: Line, *argv: str, **more: Any) -> str:
    _, _, box = ask(line, "POST", "/v1/sandboxes", {})
    _, _, command = ask(line, "POST", f"/v1/sandboxes/{box['id']}/commands", {"argv": list(argv), **more})
    return f"/v1/sandboxes/{box['id']}/commands/{command['id']}"


@pytest.mark.req("EXE-3")
def test_events_resume_where_they_stopped(node: Served) -> None:
    with contextlib.closing(Line(node.socket)) as line:
        path = start(line, "ticks", "4", "0.01")
        events = ask(line, "GET", f"{path}/output?follow=true", accept="text/event-stream")[2].decode()
        ids = [part.split("\n")[0] for part in events.split("id: ")[1:]]
        assert ids == ["1.2", "1.4", "1.6", "1.8"]
        assert events.rstrip().split("\n\n")[-1].startswith("event: end\ndata: {")
        rest = ask(line, "GET", f"{path}/output?follow=true&from=0", accept="text/event-stream", last_event_id="1.6")[
            2
        ].decode()
        assert [part.split("\n")[0] for part in rest.split("id: ")[1:]] == ["1.8"]
        raw, headers = (
            ask(line, "GET", f"{path}/output?from=1.4&fd=1")[2],
            ask(line, "GET", f"{path}/output?from=1.4")[1],
        )
        assert raw == b"2\n"
        assert headers["cloche-cursor"] == "1.4"
        assert ask(line, "GET", f"{path}/output?from=2.0")[2]["code"] == "rolled_back"
        assert ask(line, "GET", f"{path}/output?from=99")[2]["code"] == "cursor_ahead"


@pytest.mark.req("EXE-3")
def test_the_first_output_comes_at_once(node: Served) -> None:
    with contextlib.closing(Line(node.socket)) as line:
        _, _, box = ask(line, "POST", "/v1/sandboxes", {})
        body = json.dumps({"argv": ["ticks", "2", "30"]}).encode()
        line.request("POST", f"/v1/sandboxes/{box['id']}/commands", body, {"accept": "text/event-stream"})
        began = time.monotonic()
        answer = line.getresponse()
        seen = b""
        while b"event: stdout" not in seen:
            seen += answer.read1(65536)
        assert time.monotonic() - began < 5
        assert seen.startswith(b"event: command\n")


@pytest.mark.req("EXE-3")
def test_a_reader_who_leaves_is_noticed_also_while_nothing_is_said(node: Served) -> None:
    with contextlib.closing(Line(node.socket)) as line:
        path = start(line, "silent", "60")
        for accept in ("text/event-stream", "application/octet-stream"):
            with contextlib.closing(Line(node.socket)) as reader:
                reader.request("GET", f"{path}/output?follow=true", headers={"accept": accept})
                assert reader.getresponse().status == 200
                wait_until(lambda: node.backend.readers == 1)
            wait_until(lambda: node.backend.readers == 0)


@pytest.mark.req("EXE-3")
def test_a_slow_reader_holds_nothing_but_its_window(node: Served) -> None:
    with contextlib.closing(Line(node.socket)) as line:
        path = start(line, "bulk", str(64 * 1024 * 1024))
        with contextlib.closing(Line(node.socket)) as reader:
            reader.request("GET", f"{path}/output?follow=true")
            answer = reader.getresponse()
            assert answer.read(1000) == (bytes(range(256)) * 4)[:1000]
            assert ask(line, "GET", path)[0] == 200  # others are served meanwhile
            assert len(answer.read()) == 64 * 1024 * 1024 - 1000


def test_silence_is_broken_by_a_comment(node: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT_S", 0.05)
    with contextlib.closing(Line(node.socket)) as line:
        path = start(line, "silent", "1")
        events = ask(line, "GET", f"{path}/output?follow=true", accept="text/event-stream")[2]
        assert events.count(b": alive\n\n") >= 3
        assert events.endswith(b"\n\n")
        assert b"event: end" in events


@pytest.mark.req("UX-6")
def test_a_stream_that_breaks_says_so(node: Served) -> None:
    with contextlib.closing(Line(node.socket)) as line:
        path = start(line, "bulk", str(2 * 1024 * 1024))
        node.backend.break_output_after = 1024 * 1024
        events = ask(line, "GET", f"{path}/output", accept="text/event-stream")[2]
        last = events.rstrip().split(b"\n\n")[-1]
        assert last.startswith(b"event: error\ndata: ")
        assert b"broken on purpose" not in events
    with contextlib.closing(Line(node.socket)) as line, pytest.raises(http.client.IncompleteRead):
        ask(line, "GET", f"{path}/output")


@pytest.mark.req("EXE-6")
def test_half_a_file_is_not_a_file(node: Served) -> None:
    with contextlib.closing(Line(node.socket)) as line:
        ask(line, "POST", "/v1/sandboxes", {"name": "box"})
        with contextlib.closing(Line(node.socket)) as writer:
            writer.putrequest("PUT", "/v1/sandboxes/box/files?path=/half")
            writer.putheader("content-length", "1000")
            writer.endheaders()
            writer.send(b"x" * 500)
        assert ask(line, "PUT", "/v1/sandboxes/box/files?path=/whole", b"x" * 1000)[2] == {"bytes": 1000}
        assert "/half" not in node.backend.files


@pytest.fixture
def tcp(tmp_path: Path) -> Iterator[tuple[Served, int]]:
    with socket.create_server(("127.0.0.1", 0)) as finder:
        port = finder.getsockname()[1]
    config = TcpConfig("127.0.0.1", port, (ApiKey.of("ci", "the-key"),))
    with served(tmp_path, config) as one:
        yield one, port


@pytest.mark.req("ISO-3")
def test_tcp_asks_for_key_host_and_origin(tcp: tuple[Served, int]) -> None:
    _, port = tcp

    def status(**headers: str) -> int:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as line:
            return ask(line, "GET", "/v1/sandboxes", **headers)[0]

    key = {"authorization": "Bearer the-key"}
    assert status() == 401
    assert status(authorization="Bearer other") == 401
    assert status(**key) == 200
    assert status(**key, origin="http://evil.example") == 403
    assert status(**key, host="rebound.example") == 421
    assert status(**key, host=f"localhost:{port}") == 200


@pytest.mark.req("ISO-3")
@pytest.mark.req("EXE-8")
def test_websockets_go_through_the_same_gate(tcp: tuple[Served, int]) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    node, port = tcp
    with contextlib.closing(Line(node.socket)) as line:
        _, _, box = ask(line, "POST", "/v1/sandboxes", {})
    url = f"ws://127.0.0.1:{port}/v1/sandboxes/{box['id']}/ports/8000"
    for headers, status in [
        ({}, 401),
        ({"authorization": "Bearer the-key"}, 404),
        ({"authorization": "Bearer the-key", "origin": "http://x"}, 403),
    ]:
        with pytest.raises(InvalidStatus) as raised:
            connect(url, additional_headers=headers, proxy=None).__enter__()
        assert raised.value.response.status_code == status  # 404: the key's owner has no such sandbox
        assert json.loads(raised.value.response.body or b"")["fix"]


def test_it_does_not_start_where_strangers_could_come_in(tmp_path: Path) -> None:
    config = TcpConfig("0.0.0.0", 1, (ApiKey.of("ci", "the-key"),))
    with pytest.raises(Exception, match="tls_required"), served(tmp_path, config):
        pass


def test_the_socket_appears_with_its_mode_and_goes_with_the_server(tmp_path: Path) -> None:
    with served(tmp_path) as one:
        assert one.socket.stat().st_mode & 0o777 == 0o666
        assert [path.name for path in tmp_path.iterdir()] == ["api.sock"]
    assert not list(tmp_path.iterdir())


@pytest.mark.req("UX-6")
def test_what_the_description_says_is_what_happens(tcp: tuple[Served, int], long_run: bool, seed: int) -> None:
    _, port = tcp
    key = {"Authorization": "Bearer the-key"}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as line:
        ask(line, "POST", "/v1/sandboxes", {"name": "box"}, **{name.lower(): value for name, value in key.items()})
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json", headers=key)
    schemathesis.serializer.alias("application/x-tar", "application/octet-stream")
    bounds = settings(
        max_examples=60 if long_run else 6,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    asked = 0

    def check(case: Any) -> None:
        nonlocal asked
        asked += 1
        answer = case.call(headers=key, timeout=20)
        assert answer.status_code != 500, answer.text
        if answer.status_code >= 400:
            assert answer.headers["content-type"][0].startswith("application/problem+json")
        case.validate_response(answer, checks=[status_code_conformance, response_schema_conformance])

    for found in schema.get_all_operations():
        operation: Any = found
        seeded(seed)(bounds(given(case=operation.ok().as_strategy())(check)))()
    assert asked > 60
