"""The way out in the SDK, over real HTTP; `test_sync_egress.py` is made from this file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche import AsyncNode, AsyncSandbox, ClocheError
from cloche.client import AsyncEgress
from cloche.client._target import parse_url
from cloche.wire.egress import EgressRule
from tests.unit.api.served import BadLine, Served, served


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with served(tmp_path) as one:
        monkeypatch.setenv("CLOCHE_URL", one.url)
        yield one


@pytest.mark.req("NET-3")
async def test_a_request_says_what_it_may_reach(node: Served) -> None:
    rules = ["preset:python-packages", EgressRule(host="api.example.com", methods=["GET"])]
    async with await AsyncSandbox.create(egress=rules, secrets=["API_TOKEN"]):
        (asked,) = node.backend.asked
        assert asked.egress == ["preset:python-packages", EgressRule(host="api.example.com", methods=["GET"])]
        assert asked.secrets == ["API_TOKEN"]
    with pytest.raises(ClocheError, match="egress"):
        await AsyncSandbox.create(egress=[{"hosts": "a.example"}])


@pytest.mark.req("NET-6")
async def test_records_come_in_pages_and_as_they_are_made(node: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloche.client._async.egress.PAGE", 2)
    async with await AsyncSandbox.create() as box:
        for number in range(5):
            node.backend.attempt(box.id, f"h{number}.example")
        assert [each.host for each in await box.egress.records()] == [f"h{number}.example" for number in range(5)]
        assert [each.seq for each in await box.egress.records(after=3)] == [4, 5]
        assert [each.seq for each in await box.egress.records(limit=3)] == [1, 2, 3]
        seen = []
        async for record in box.egress.follow(after=4):
            seen.append(record.host)
            if record.seq == 5:
                node.backend.attempt(box.id, "last.example")
            else:
                await box.kill()
        assert seen == ["h4.example", "last.example"]


@pytest.mark.req("NET-6")
async def test_a_lost_connection_goes_on_from_the_last_record(node: Served, tmp_path: Path) -> None:
    with BadLine(tmp_path, node.socket, 5, 900, 2500) as line:
        async with AsyncNode(parse_url(line.url, None)) as bad, AsyncNode(parse_url(node.url, None)) as good:
            box = await AsyncSandbox.create(node=good)
            for number in range(30):
                node.backend.attempt(box.id, f"h{number}.example")
            bad.transport._has_answered = True
            seen = []
            async for record in AsyncEgress(bad.transport, box.id).follow():
                seen.append(record.seq)
                if record.seq == 30:
                    await box.kill()
            assert seen == list(range(1, 31))
            assert line.broken > 2


@pytest.mark.req("NET-3")
async def test_a_grant_and_its_end(node: Served) -> None:
    async with await AsyncSandbox.create() as box:
        granted = await box.egress.allow("api.example.com", for_s=60)
        assert granted.rule.host == "api.example.com"
        narrow = await box.egress.allow("b.example", methods=["GET"], for_s=60)
        assert narrow.rule == EgressRule(host="b.example", methods=["GET"])
        assert [each.id for each in await box.egress.grants()] == [granted.id, narrow.id]
        await box.egress.revoke(granted.id)
        assert [each.id for each in await box.egress.grants()] == [narrow.id]
        with pytest.raises(ClocheError) as refused:
            await box.egress.revoke(granted.id)
        assert refused.value.code == "grant_not_found"
        assert (await box.egress.explain("pastebin.example:443")).effect == "deny"
