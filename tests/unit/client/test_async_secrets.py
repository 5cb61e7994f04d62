"""Secrets and approvals of the SDK over real HTTP and real rooms; `test_sync_secrets.py` is made from this file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche import AsyncNode, ClocheError
from cloche.client import Target
from cloche.wire.secrets import Place
from tests.unit.approvals.questions import question
from tests.unit.secrets.room import VALUE
from tests.unit.secrets.rooms_served import ServedRooms, rooms

BEARER = Place(kind="header", name="Authorization", format="Bearer {}")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedRooms]:
    with rooms(tmp_path, scope_s_max=60.0) as one:
        monkeypatch.setenv("CLOCHE_URL", one.url)
        yield one


@pytest.mark.req("SEC-2")
async def test_set_list_remove(node: ServedRooms) -> None:
    async with AsyncNode() as client:
        view = await client.secrets.set(
            "TOKEN",
            VALUE,
            hosts=["api.example.com"],
            places=[BEARER],
            methods=["GET"],
            paths=["/repos/**"],
            require=True,
        )
        assert (view.name, view.source, view.methods, view.paths, view.require) == (
            "TOKEN",
            "value",
            ["GET"],
            ["/repos/**"],
            True,
        )
        source = {"kind": "command", "argv": ["/bin/echo", "a minted value"], "ttl_s": 60}
        await client.secrets.set(
            "MINTED", source=source, hosts=["b.example"], places=[{"kind": "query", "name": "key"}]
        )
        assert [(each.name, each.source) for each in await client.secrets.list()] == [
            ("MINTED", "command"),
            ("TOKEN", "value"),
        ]
        assert (await client.secrets.remove("MINTED")).hosts == ["b.example"]
        with pytest.raises(ClocheError) as raised:
            await client.secrets.remove("MINTED")
        assert raised.value.code == "secret_not_found"
        with pytest.raises(ClocheError) as raised:
            await client.secrets.set("not a name", VALUE, hosts=["b.example"], places=[BEARER])
        assert raised.value.code == "invalid_request"
        assert VALUE not in repr(client.secrets) + str(raised.value)


@pytest.mark.req("POL-3")
async def test_questions_are_seen_and_answered(node: ServedRooms) -> None:
    async with AsyncNode() as client:
        changes = client.approvals.watch()
        seen = []
        verdict = None
        async for found in changes:
            seen.append([each.state for each in found])
            if verdict is None:
                verdict = node.run(node.backend.approvals.ask(question(), timeout_s=30.0))
            elif found:
                assert (await client.approvals.approve(found[0].id, scope_s=30.0)).state == "approved"
            else:
                break
        assert seen == [[], ["waiting"], []]
        assert verdict is not None
        assert verdict.result(5).approved
        again = node.run(node.backend.approvals.ask(question(host="b.example"), timeout_s=30.0))
        while not (waiting := await client.approvals.list()):
            pass
        assert (await client.approvals.deny(waiting[0].id)).state == "denied"
        assert again.result(5).reason == "denied"
        with pytest.raises(ClocheError) as raised:
            await client.approvals.deny(waiting[0].id)
        assert raised.value.code == "approval_over"
        states = [each.state for each in await client.approvals.list(include_over=True)]
        assert states == ["approved", "denied"]
        assert "Approvals" in repr(client.approvals)


@pytest.mark.req("SEC-1")
async def test_a_value_is_not_sent_in_the_clear_over_a_network() -> None:
    async with AsyncNode(Target("url", "http://198.51.100.7:8080", None)) as client:
        with pytest.raises(ClocheError, match="in the clear") as raised:
            await client.secrets.set("TOKEN", VALUE, hosts=["b.example"], places=[BEARER])
        assert VALUE not in str(raised.value)
