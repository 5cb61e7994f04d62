"""Approvals by the SDK, the API and a webhook's token, over a real socket."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

from cloche.client import Node, Target
from cloche.wire.errors import ClocheError
from cloche_server.api.caller import ApiKey, TcpConfig
from cloche_server.approvals.queue import Verdict
from tests.unit.approvals.questions import question
from tests.unit.secrets.room import Server
from tests.unit.secrets.rooms_served import ServedRooms, rooms


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def node_of(served: ServedRooms) -> Node:
    return Node(Target("user", "http://cloche", str(served.socket)))


@pytest.mark.req("POL-3")
def test_list_approve_deny_and_a_second_answer(tmp_path: Path) -> None:
    with rooms(tmp_path, scope_s_max=60.0) as served, node_of(served) as node:
        for approve in (True, False):
            verdict = served.run(served.backend.approvals.ask(question(), timeout_s=30.0))
            wait_until(node.approvals.list)
            (asked,) = node.approvals.list()
            assert (asked.host, asked.scope_s_max, asked.state) == ("hooks.example.com", 60.0, "waiting")
            done = node.approvals.approve(asked.id[:9]) if approve else node.approvals.deny(asked.id)
            assert done.state == ("approved" if approve else "denied")
            assert verdict.result(5).approved is approve
            with pytest.raises(ClocheError) as raised:
                node.approvals.approve(asked.id)
            assert raised.value.code == "approval_over"
        with pytest.raises(ClocheError) as raised:
            node.approvals.approve("nosuch")
        assert raised.value.code == "approval_not_found"
        assert [each.state for each in node.approvals.list(include_over=True)] == ["approved", "denied"]
    journal = (served.backend.state / "journal").glob("*.jsonl")
    lines = [json.loads(line) for path in journal for line in path.read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds == ["approval.asked", "approval.answered"] * 2
    assert lines[1]["detail"]["address"] == "203.0.113.7"
    assert lines[1]["detail"]["by"] == asked.answered_by or lines[1]["detail"]["by"].startswith("uid:")


def test_a_watch_sees_questions_come_and_go(tmp_path: Path) -> None:
    with rooms(tmp_path) as served, node_of(served) as node:
        seen: list[list[str]] = []

        def watch() -> None:
            with node_of(served) as own:
                for found in own.approvals.watch():
                    seen.append([each.state for each in found])
                    if len(seen) == 3:
                        return

        watcher = threading.Thread(target=watch)
        watcher.start()
        wait_until(lambda: seen)
        began = time.monotonic()
        verdict = served.run(served.backend.approvals.ask(question(), timeout_s=30.0))
        wait_until(lambda: len(seen) == 2)
        node.approvals.deny(node.approvals.list()[0].id)
        watcher.join(10.0)
        assert seen == [[], ["waiting"], []]
        assert time.monotonic() - began < 5.0, "a change is not told at once"
        assert not verdict.result(5).approved


@pytest.mark.req("POL-3")
def test_a_webhooks_token_needs_no_key_and_opens_nothing_else(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    tcp = TcpConfig("127.0.0.1", port, (ApiKey.of("one", "its key"),))
    with Server((204, b"")) as hook, rooms(tmp_path, tcp, webhook=(hook.url, b"k" * 32)) as served:
        verdict = served.run(served.backend.approvals.ask(question(), timeout_s=30.0))
        wait_until(lambda: hook.seen)
        path = json.loads(hook.seen[0][3])["answer"]["path"]
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}") as stranger:
            assert stranger.get("/v1/approvals").status_code == 401
            assert stranger.get("/v1/secrets").status_code == 401
            assert stranger.post("/v1/approvals/answers/" + "x" * 43, json={"answer": "approve"}).status_code == 404
            assert stranger.post("/v1/approvals/answers/../x", json={"answer": "approve"}).status_code in (401, 404)
            scope = stranger.post(path, json={"answer": "approve", "scope_s": 5})
            assert (scope.status_code, scope.json()["code"]) == (403, "approval_scope_refused")
            answer = stranger.post(path, json={"answer": "approve"})
            assert (answer.status_code, answer.json()["state"], answer.json()["answered_by"]) == (
                200,
                "approved",
                "webhook",
            )
            assert verdict.result(5) == Verdict(True, "webhook", "approved")
            assert stranger.post(path, json={"answer": "deny"}).status_code == 404
