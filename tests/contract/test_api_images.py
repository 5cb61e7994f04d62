"""Images over HTTP, on real sockets and a backend in memory: events, bodies that are streamed, and who may do what."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from cloche_server.api import streams
from tests.contract.test_api import Line, as_user, ask, needs_root, open_node, wait_until
from tests.unit.api.served import Served, served

__all__ = ["open_node"]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as one:
        yield one


def events_of(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in body.decode().strip().split("\n\n"):
        if not block.startswith(":"):
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


@pytest.mark.req("IMG-1")
def test_a_pull_is_a_stream_of_events(node: Served) -> None:
    with contextlib.closing(Line(node.socket)) as line:
        status, headers, body = ask(line, "POST", "/v1/images/pull", {"image": "python:3.12-slim"})
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        events = events_of(body)
        assert {name for name, _ in events} == {"image"}
        assert [event["kind"] for _, event in events] == ["resolved", *["layer"] * 4, "convert", "done"]
        view = events[-1][1]["view"]
        assert ask(line, "GET", f"/v1/images/inspect?image={view['digest']}")[2] == view
        assert ask(line, "GET", "/v1/images")[2]["images"] == [view]
        assert ask(line, "DELETE", "/v1/images?image=python:3.12-slim")[2] == view
        assert ask(line, "GET", "/v1/images")[2] == {"images": []}


@pytest.mark.req("UX-6")
@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/v1/images/pull", {"image": "missing:1"}, 404, "image_not_found"),
        ("POST", "/v1/images/pull", {"image": "denied:1"}, 403, "registry_denied"),
        ("POST", "/v1/images/pull", {"image": "crash"}, 500, "internal"),
        ("POST", "/v1/images/pull", {}, 400, "invalid_request"),
        ("POST", "/v1/images/pull", {"image": "x" * 600}, 400, "invalid_request"),
        ("POST", "/v1/images/pull", {"image": "x", "nonsense": 1}, 400, "invalid_request"),
        ("POST", "/v1/images/pull", {"image": "x", "credentials": {"username": "secret"}}, 400, "invalid_request"),
        ("GET", "/v1/images/inspect", None, 400, "invalid_request"),
        ("GET", "/v1/images/inspect?image=", None, 400, "invalid_request"),
        ("GET", "/v1/images/inspect?image=none", None, 404, "image_not_found"),
        ("GET", "/v1/images/export?image=none", None, 404, "image_not_found"),
        ("DELETE", "/v1/images?image=none", None, 404, "image_not_found"),
        ("POST", "/v1/images/import", b"", 422, "image_refused"),
        ("POST", f"/v1/images/import?name={'x' * 600}", b"x", 400, "invalid_request"),
        ("POST", "/v1/images/build?options=%7B", b"x", 400, "invalid_request"),
        ("POST", "/v1/images/build?options=%7B%22secret%22%3A1%7D", b"x", 400, "invalid_request"),
        ("POST", "/v1/images/gc", {"max_bytes": -1}, 400, "invalid_request"),
        ("POST", "/v1/images/fsck?repair=perhaps", None, 400, "invalid_request"),
    ],
)
def test_what_fails_before_the_first_event_is_a_status(
    node: Served, method: str, path: str, body: Any, status: int, code: str
) -> None:
    with contextlib.closing(Line(node.socket)) as line:
        answered, headers, problem = ask(line, method, path, body)
        assert (answered, problem["code"], headers["content-type"]) == (status, code, "application/problem+json")
        assert "secret words" not in json.dumps(problem)


@pytest.mark.req("UX-6")
def test_what_fails_later_is_the_last_event(node: Served) -> None:
    with contextlib.closing(Line(node.socket)) as line:
        events = events_of(ask(line, "POST", "/v1/images/pull", {"image": "broken:1"})[2])
        assert [name for name, _ in events] == ["image", "error"]
        assert events[-1][1]["code"] == "image_corrupt"
        options = quote(json.dumps({"target": "broken"}))
        events = events_of(ask(line, "POST", f"/v1/images/build?options={options}", b"tar")[2])
        assert [event.get("kind", event.get("code")) for _, event in events] == [
            "step",
            "step",
            "output",
            "build_failed",
        ]


@pytest.mark.req("IMG-2")
def test_bodies_are_streamed_and_larger_than_any_json(node: Served) -> None:
    data = bytes(range(256)) * (10 * 1024 * 4)
    with contextlib.closing(Line(node.socket)) as line:
        events = events_of(ask(line, "POST", "/v1/images/import?name=big:1", data)[2])
        assert events[-1][1]["kind"] == "done"
        assert node.backend.archives["big:1"] == data
        assert ask(line, "GET", "/v1/images/export?image=big:1")[2] == data
        options = quote(json.dumps({"name": "app:1", "args": {"A": "ä=b"}, "no_cache": True}))
        ask(line, "POST", f"/v1/images/build?options={options}", data)
        asked, context = node.backend.builds[0]
        assert (asked.name, asked.args, asked.no_cache, context == data) == ("app:1", {"A": "ä=b"}, True, True)
        assert ask(line, "POST", "/v1/images/pull", b'"' + data)[0] == 413, "JSON stays bounded"


@pytest.mark.req("EXE-6")
def test_half_an_archive_is_not_one(node: Served) -> None:
    for verb in ("import?name=half:1", "build?options=%7B%7D"):
        with contextlib.closing(Line(node.socket)) as writer:
            writer.putrequest("POST", f"/v1/images/{verb}")
            writer.putheader("content-length", "1000")
            writer.endheaders()
            writer.send(b"x" * 500)
    with contextlib.closing(Line(node.socket)) as line:
        assert ask(line, "POST", "/v1/images/import?name=whole:1", b"x")[0] == 200
        assert [view["names"] for view in ask(line, "GET", "/v1/images")[2]["images"]] == [["whole:1"]]
        assert node.backend.builds == []


@pytest.mark.req("EXE-3")
def test_a_pull_beats_while_it_is_silent_and_ends_with_its_reader(
    node: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "HEARTBEAT_S", 0.05)
    node.backend.pull_until = asyncio.Event()
    with contextlib.closing(Line(node.socket)) as reader:
        reader.request("POST", "/v1/images/pull", json.dumps({"image": "slow"}), {"content-type": "application/json"})
        answer = reader.getresponse()
        seen = b""
        while seen.count(b": alive") < 3:
            seen += answer.read1(65536)
        assert node.backend.working == 1
    wait_until(lambda: node.backend.working == 0)
    assert node.backend.images == {}


@needs_root
@pytest.mark.req("ISO-3")
def test_only_an_administrator_collects_and_repairs(open_node: Served) -> None:
    with as_user(1001, open_node.socket) as user:
        for path, body in (("/v1/images/gc", {}), ("/v1/images/fsck?repair=true", None)):
            status, _, problem = ask(user, "POST", path, body)
            assert (status, problem["code"]) == (403, "forbidden"), path
        assert open_node.backend.collected == []
        assert ask(user, "POST", "/v1/images/fsck")[0] == 200, "looking is for all"
    with contextlib.closing(Line(open_node.socket)) as root:
        assert ask(root, "POST", "/v1/images/gc", {"max_age_s": 5})[0] == 200
        assert ask(root, "POST", "/v1/images/fsck?repair=true")[0] == 200
    assert open_node.backend.collected[0].max_age_s == 5
