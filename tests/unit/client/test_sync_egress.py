# Made by tools/unasync.py from tests/unit/client/test_async_egress.py: edit that one.
"""The way out in the SDK, over real HTTP; `test_sync_egress.py` is made from this file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche import ClocheError, Node, Sandbox
from cloche.client import Egress
from cloche.client._target import parse_url
from cloche.wire.egress import EgressRule
from tests.unit.api.served import BadLine, Served, served


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with served(tmp_path) as one:
        monkeypatch.setenv("CLOCHE_URL", one.url)
        yield one


@pytest.mark.req("NET-3")
def test_a_request_says_what_it_may_reach(node: Served) -> None:
    rules = ["preset:python-packages", EgressRule(host="api.example.com", methods=["GET"])]
    with Sandbox.create(egress=rules, secrets=["API_TOKEN"]):
        (asked,) = node.backend.asked
        assert asked.egress == ["preset:python-packages", EgressRule(host="api.example.com", methods=["GET"])]
        assert asked.secrets == ["API_TOKEN"]
    with pytest.raises(ClocheError, match="egress"):
        Sandbox.create(egress=[{"hosts": "a.example"}])


@pytest.mark.req("NET-6")
def test_records_come_in_pages_and_as_they_are_made(node: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloche.client._sync.egress.PAGE", 2)
    with Sandbox.create() as box:
        for number in range(5):
            node.backend.attempt(box.id, f"h{number}.example")
        assert [each.host for each in box.egress.records()] == [f"h{number}.example" for number in range(5)]
        assert [each.seq for each in box.egress.records(after=3)] == [4, 5]
        assert [each.seq for each in box.egress.records(limit=3)] == [1, 2, 3]
        seen = []
        for record in box.egress.follow(after=4):
            seen.append(record.host)
            if record.seq == 5:
                node.backend.attempt(box.id, "last.example")
            else:
                box.kill()
        assert seen == ["h4.example", "last.example"]


@pytest.mark.req("NET-6")
def test_a_lost_connection_goes_on_from_the_last_record(node: Served, tmp_path: Path) -> None:
    with BadLine(tmp_path, node.socket, 5, 900, 2500) as line:
        with Node(parse_url(line.url, None)) as bad, Node(parse_url(node.url, None)) as good:
            box = Sandbox.create(node=good)
            for number in range(30):
                node.backend.attempt(box.id, f"h{number}.example")
            bad.transport._has_answered = True
            seen = []
            for record in Egress(bad.transport, box.id).follow():
                seen.append(record.seq)
                if record.seq == 30:
                    box.kill()
            assert seen == list(range(1, 31))
            assert line.broken > 2


@pytest.mark.req("NET-3")
def test_a_grant_and_its_end(node: Served) -> None:
    with Sandbox.create() as box:
        granted = box.egress.allow("api.example.com", for_s=60)
        assert granted.rule.host == "api.example.com"
        narrow = box.egress.allow("b.example", methods=["GET"], for_s=60)
        assert narrow.rule == EgressRule(host="b.example", methods=["GET"])
        assert [each.id for each in box.egress.grants()] == [granted.id, narrow.id]
        box.egress.revoke(granted.id)
        assert [each.id for each in box.egress.grants()] == [narrow.id]
        with pytest.raises(ClocheError) as refused:
            box.egress.revoke(granted.id)
        assert refused.value.code == "grant_not_found"
        assert (box.egress.explain("pastebin.example:443")).effect == "deny"
