"""A connection is looked into only after the interceptor knows every secret of its sandbox; and not after the end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche.wire.ids import new_id
from cloche.wire.secrets import Place, SetSecret, Source
from cloche_server.egress.services import InterceptedConnection, Who
from cloche_server.node import ways as ways_module
from cloche_server.node.node import Config, Node
from cloche_server.policy.model import Target
from cloche_server.secrets.leases import Lease
from tests.unit.node.house import ME, make_images

TARGET = Target("api.example", 443)


@dataclass
class Given:
    pem: bytes = b"pem"
    java: bytes | None = None


@dataclass
class StandIn:
    """What the node uses of the interceptor's host side; the real one is in tests/promises/egress."""

    ready: asyncio.Event = field(default_factory=asyncio.Event)
    told: dict[str, list[str]] = field(default_factory=dict)
    opened: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    too_much: bool = False

    async def prepare(self, who: Who, *, max_age_s: float = 0.0) -> Given:
        await self.ready.wait()
        return Given()

    def sandbox(self, who: Who, leases: Sequence[Lease]) -> None:
        if self.too_much:
            raise ways_module.error("secret_unavailable", "too much of it")
        self.told[who.sandbox] = [lease.value.reveal().decode() for lease in leases]

    def forget(self, sandbox: str) -> None:
        self.forgotten.append(sandbox)

    def keep_lineages(self, lineages: set[str]) -> None: ...

    def state(self) -> str:
        return "ready"

    async def close(self) -> None: ...

    async def open(
        self, gate_side: InterceptedConnection, who: Who, target: Target, *, tls: bool, rule: str
    ) -> socket.socket:
        self.opened.append(who.sandbox)
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture
async def node(tmp_path: Path, stand_in: StandIn) -> AsyncIterator[Node]:
    config = Config(tmp_path / "state", make_images(tmp_path), interception=lambda *_: stand_in)
    made = Node(config, {})
    await made.start()
    secret = SetSecret(
        source=Source(kind="value", value="the-real-value"),  # type: ignore[arg-type]
        hosts=["api.example"],
        places=[Place(kind="header", name="Authorization")],
    )
    await made.set_secret(ME, "TOKEN", secret)
    yield made
    await made.stop()


def who() -> Who:
    return Who(new_id("sandbox"), ME.owner, ME.tenant, new_id("lineage"))


def opening(node: Node, asker: Who) -> asyncio.Task[socket.socket]:
    work = node.context.ways.services.interception.open(None, asker, TARGET, tls=True, rule="x")  # type: ignore[arg-type]
    return asyncio.ensure_future(work)  # type: ignore[arg-type]


@pytest.mark.req("SEC-3")
async def test_a_connection_waits_until_every_secret_is_known(node: Node, stand_in: StandIn) -> None:
    asker = who()
    admitting = asyncio.ensure_future(node.context.ways.admit(asker, ["TOKEN"]))
    await asyncio.sleep(0)
    waiting = opening(node, asker)
    await asyncio.sleep(0.05)  # sleep: time in which it must not happen
    assert stand_in.opened == []
    stand_in.ready.set()
    admitted = await admitting
    (await waiting).close()
    assert stand_in.told[asker.sandbox] == ["the-real-value"]
    assert stand_in.opened == [asker.sandbox]
    assert admitted.env["TOKEN"].startswith("cloche_ph_")
    assert admitted.files == {"trust.pem": b"pem"}
    placeholders = node.context.ways.placeholders(asker, ["TOKEN"])
    assert placeholders is not None
    assert placeholders.found(admitted.env["TOKEN"].encode()) == "TOKEN"


@pytest.mark.req("SEC-3")
async def test_it_does_not_wait_for_ever_and_not_for_a_stranger(
    node: Node, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways_module, "ADMISSION_S", 0.05)
    asker = who()
    admitting = asyncio.ensure_future(node.context.ways.admit(asker, ["TOKEN"]))
    await asyncio.sleep(0)
    for each in (asker, who()):
        with pytest.raises(ClocheError) as refused:
            await opening(node, each)
        assert refused.value.code == "interceptor_missing"
    assert stand_in.opened == []
    admitting.cancel()
    await asyncio.wait([admitting])


@pytest.mark.req("SEC-4")
async def test_at_the_end_nothing_is_held_also_when_it_ends_in_between(node: Node, stand_in: StandIn) -> None:
    asker, early = who(), who()
    hurried = asyncio.ensure_future(node.context.ways.admit(early, ["TOKEN"]))
    await asyncio.sleep(0)
    node.context.ways.release(early)
    stand_in.ready.set()
    with pytest.raises(ClocheError) as refused:
        await hurried
    assert refused.value.code == "sandbox_ended"
    assert early.sandbox not in stand_in.told
    await node.context.ways.admit(asker, ["TOKEN"])
    assert node.secrets.leases(asker.sandbox)
    node.context.ways.release(asker)
    assert node.secrets.leases(asker.sandbox) == ()
    assert node.secrets.leases(early.sandbox) == ()
    assert {asker.sandbox, early.sandbox} <= set(stand_in.forgotten)
    with pytest.raises(ClocheError):
        await opening(node, asker)


@pytest.mark.req("SEC-4")
async def test_what_the_interceptor_refuses_is_not_held_and_can_be_tried_again(node: Node, stand_in: StandIn) -> None:
    stand_in.ready.set()
    stand_in.too_much = True
    asker = who()
    with pytest.raises(ClocheError) as refused:
        await node.context.ways.admit(asker, ["TOKEN"])
    assert refused.value.code == "secret_unavailable"
    assert node.secrets.leases(asker.sandbox) == ()
    stand_in.too_much = False
    await node.context.ways.admit(asker, ["TOKEN"])
    assert stand_in.told[asker.sandbox] == ["the-real-value"]
