"""The order of a create: the engine is sealed before a byte of the caller's program can run, and nobody uses it early."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloche.wire.commands import StartCommand
from cloche.wire.sandboxes import SandboxState
from cloche_server import points
from cloche_server.engines.contract import EngineError
from cloche_server.node.sandbox import Sandbox
from tests.unit.node.house import ADMIN, ME, House, make_images, once, raises, until
from tests.unit.node.native_engine import NativeInstance, can_run

pytestmark = pytest.mark.skipif(not can_run(), reason="needs root, unshare and a built agent (just setup)")


class Seal:
    """Stands where the engine's `seal` is: done when the test says so. `order` is what happened, in its order."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.failure: Exception | None = None
        self.order: list[str] = []

    async def __call__(self) -> None:
        self.order.append("sealing")
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure
        self.order.append("sealed")

    def reached(self, point: str) -> None:
        if point == "node.command.before_open":
            self.order.append("OPEN")


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path, make_images(tmp_path))
    await made.node.start()
    yield made
    await made.node.kill_all(ADMIN)
    await made.node.stop()


@pytest.fixture
async def seal(monkeypatch: pytest.MonkeyPatch) -> Seal:
    made = Seal()
    monkeypatch.setattr(NativeInstance, "seal", lambda self: made())
    monkeypatch.setattr(points, "reached", made.reached)
    return made


async def half_made(house: House) -> Sandbox:
    """The sandbox, once its guest has answered everything that it was sent so far."""
    live = house.node.roster.live
    await until(lambda: any(each.running for each in live.values()))
    (made,) = live.values()
    assert made.channel is not None
    await made.channel.ping(10)
    return made


@pytest.mark.req("ISO-4")
async def test_the_seal_is_done_before_the_first_command_goes_out(house: House, seal: Seal, tmp_path: Path) -> None:
    proof = tmp_path / "it ran"
    creating = asyncio.ensure_future(house.create(command={"argv": ["touch", str(proof)]}))
    made = await half_made(house)
    assert (made.state, seal.order, proof.exists()) == (SandboxState.CREATING, ["sealing"], False)
    seal.may_end.set()
    first = (await creating).first_command
    assert seal.order == ["sealing", "sealed", "OPEN"]
    assert first is not None
    assert (await house.node.wait_command(ME, made.id, first, 10)).ended is not None
    assert proof.exists()


@pytest.mark.req("ISO-4")
@pytest.mark.req("LIF-2")
async def test_without_a_seal_the_first_command_never_goes_out(house: House, seal: Seal, tmp_path: Path) -> None:
    proof = tmp_path / "it ran"
    seal.failure = EngineError("keeper_failed", "planned")
    seal.may_end.set()
    await raises("keeper_failed", house.create(command={"argv": ["touch", str(proof)]}))
    assert (seal.order, proof.exists()) == (["sealing"], False)
    assert (await house.node.list(ME, include_ended=True, usage=False), house.node.context.store.sandboxes()) == (
        [],
        [],
    )


@pytest.mark.req("LIF-1")
async def test_a_call_to_one_that_is_still_being_made_does_no_harm(house: House, seal: Seal) -> None:
    creating = asyncio.ensure_future(house.create(command={"argv": ["cat"], "stdin": True}))
    made = await half_made(house)
    node, first = house.node, next(iter(made.running))
    calls = [
        node.start_command(ME, made.id, StartCommand(argv=["true"]), "key"),
        node.stat(ME, made.id, "/", follow=True, user=None),
        anext(node.read_file(ME, made.id, "/proc/version", offset=0, length=None, user=None)),
        node.write_file(ME, made.id, "/tmp/x", once(b"x"), mode=None, make_parents=False, append=False, user=None),
        node.connect_port(ME, made.id, 1),
        node.write_stdin(ME, made.id, first, 0, once(b"early"), eof=True),
        node.signal(ME, made.id, first, 9),
    ]
    for call in calls:
        await raises("conflict", call)
    assert (await node.get(ME, made.id)).state is SandboxState.CREATING
    seal.may_end.set()
    assert (await creating).state is SandboxState.RUNNING
    assert [each.id for each in await node.list_commands(ME, made.id)] == [first]
    await node.write_stdin(ME, made.id, first, 0, once(b"in time"), eof=True)
    ended = await node.wait_command(ME, made.id, first, 10)
    assert await house.text(ended) == b"in time"
    assert (await house.run(made.id, "true")).ended is not None


@pytest.mark.req("LIF-2")
async def test_one_that_is_still_being_made_is_killed_and_leaves_nothing(house: House, seal: Seal) -> None:
    creating = asyncio.ensure_future(house.create(command={"argv": ["cat"]}))
    made = await half_made(house)
    await house.node.kill(ME, made.id)
    await raises("create_failed", creating)
    assert "OPEN" not in seal.order
    assert house.node.roster.live == {}
