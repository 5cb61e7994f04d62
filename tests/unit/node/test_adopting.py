"""A daemon that starts while a guest is silent: it serves all the others, and the silent one is seen, waited for and ended."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from cloche.wire.commands import Command, StartCommand, Terminal
from cloche.wire.ends import EndReason
from cloche.wire.sandboxes import CreateSandbox, SandboxState
from cloche_server import points
from cloche_server.engines.contract import EngineError
from cloche_server.node import adoption, sandbox, start
from cloche_server.node.admission import Watermarks
from cloche_server.node.journal import Journal, verify
from cloche_server.node.lifecycle import Cause, Why
from cloche_server.node.node import Config, Node
from tests.unit.node.fake_clock import FakeClock
from tests.unit.node.house import ME, make_images, once, raises, until
from tests.unit.node.native_engine import Holder, NativeEngine, can_run, is_alive

pytestmark = pytest.mark.skipif(not can_run(), reason="needs root, unshare and a built agent (just setup)")
SMALL = {"disk_bytes": 1 << 24}


class Daemons:
    """One node after the other over one state directory; the guests outlive each of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.holder = Holder(root / "holder.sock")
        self.clock = FakeClock()
        self.images = make_images(root)
        self.engine = NativeEngine(self.holder.path)
        self.node: Node

    async def start(self) -> float:
        """Seconds until it would serve."""
        self.engine = NativeEngine(self.holder.path)
        config = Config(self.root / "state", self.images, marks=Watermarks(disk_free_bytes_min=0))
        self.node = Node(config, {"gvisor": self.engine}, self.clock)
        began = time.monotonic()
        await self.node.start()
        return time.monotonic() - began

    async def restart(self) -> float:
        await self.node.stop()
        return await self.start()

    async def create(self, **more: object) -> str:
        return (await self.node.create(ME, CreateSandbox(limits=SMALL, **more), None)).id  # type: ignore[arg-type]

    async def begin(self, sandbox: str, *argv: str, **more: object) -> Command:
        return await self.node.start_command(ME, sandbox, StartCommand(argv=list(argv), **more), None)  # type: ignore[arg-type]

    async def run(self, sandbox: str, *argv: str) -> int | None:
        command = await self.begin(sandbox, *argv)
        end = (await self.node.wait_command(ME, sandbox, command.id, 20)).ended
        assert end is not None
        return end.exit_code

    def agent(self, sandbox: str) -> int:
        parent = self.holder.held[sandbox][0]
        return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])

    def silence(self, sandbox: str) -> int:
        """Nothing of this guest runs any more, until it is told to go on."""
        found = self.agent(sandbox)
        os.kill(found, signal.SIGSTOP)
        return found

    async def end_of(self, sandbox: str, seconds: float = 20) -> tuple[EndReason, str | None]:
        end = (await self.node.wait_ended(ME, sandbox, seconds)).ended
        assert end is not None
        return end.reason, end.by

    async def gone(self, sandbox: str, pid: int) -> None:
        """Nothing of it is left; its agent's process is no child of ours and is reaped by whoever got it."""
        assert sandbox not in self.holder.held
        await until(lambda: not is_alive(pid))


@pytest.fixture
async def daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Daemons]:
    monkeypatch.setattr(start, "ADOPT_S", 0.3)
    monkeypatch.setattr(sandbox, "REACH_S", 0.3)
    made = Daemons(tmp_path)
    await made.start()
    yield made
    await made.node.kill_all(ME)
    await made.node.stop()
    made.holder.close()
    verify(tmp_path / "state" / "journal")


@pytest.mark.req("LIF-6")
@pytest.mark.req("ISO-7")
async def test_a_silent_guest_keeps_nobody_waiting(daemons: Daemons, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "STATE_S", 2.0)
    silent, honest = await daemons.create(), await daemons.create()
    command = await daemons.begin(silent, "sleep", "1000")
    pid = daemons.silence(silent)
    assert await daemons.restart() < 1.5
    assert await daemons.run(honest, "true") == 0
    seen = await daemons.node.get(ME, silent)
    assert (seen.state, seen.ended, seen.commands_running) == (SandboxState.RUNNING, None, 1)
    assert {each.id: each.state for each in await daemons.node.list(ME, include_ended=False, usage=True)} == {
        silent: SandboxState.RUNNING,
        honest: SandboxState.RUNNING,
    }
    assert (await daemons.node.get_command(ME, silent, command.id)).state == "running"
    assert await daemons.end_of(silent) == (EndReason.UNRESPONSIVE, None)
    ended = (await daemons.node.get_command(ME, silent, command.id)).ended
    assert ended is not None
    assert ended.reason is EndReason.UNRESPONSIVE
    await daemons.gone(silent, pid)
    assert await daemons.run(honest, "true") == 0


@pytest.mark.req("LIF-6")
@pytest.mark.parametrize("call", ["command", "stat", "read", "stdin", "signal", "resize", "port"])
async def test_a_call_waits_a_while_and_may_be_tried_again(daemons: Daemons, call: str) -> None:
    made = await daemons.create()
    command = await daemons.begin(made, "cat", terminal=Terminal(rows=24, cols=80))
    pid = daemons.silence(made)
    await daemons.restart()

    async def ask() -> object:
        node = daemons.node
        if call == "command":
            return await node.start_command(ME, made, StartCommand(argv=["true"]), "key")
        if call == "stat":
            return await node.stat(ME, made, "/", follow=True, user=None)
        if call == "read":
            return [piece async for piece in node.read_file(ME, made, "/proc/version", offset=0, length=1, user=None)]
        if call == "stdin":
            return await node.write_stdin(ME, made, command.id, 0, once(b"x"), eof=False)
        if call == "signal":
            await node.signal(ME, made, command.id, 9)
            return None
        if call == "resize":
            await node.resize(ME, made, command.id, 20, 20)
            return None
        return await node.connect_port(ME, made, 1)

    refused = await raises("time_out", ask())
    assert refused.kind.retryable
    again = asyncio.ensure_future(ask())
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGCONT)
    if call == "port":  # reached: nobody listens there
        await raises("connection_refused", again)
    else:
        await again
    commands = await daemons.node.list_commands(ME, made)
    assert len(commands) == (2 if call == "command" else 1), "a call that was refused did nothing"


@pytest.mark.req("LIF-6")
@pytest.mark.req("RES-2")
async def test_a_sandbox_that_is_being_adopted_is_killed_at_once(daemons: Daemons) -> None:
    made = await daemons.create()
    command = await daemons.begin(made, "sleep", "1000")
    pid = daemons.silence(made)
    await daemons.restart()
    began = time.monotonic()
    end = (await daemons.node.kill(ME, made)).ended
    assert time.monotonic() - began < 2.0
    assert end is not None
    assert (end.reason, end.by) == (EndReason.KILLED, ME.owner)
    assert (await daemons.node.get_command(ME, made, command.id)).state == "ended"
    await daemons.gone(made, pid)
    await raises("sandbox_ended", daemons.begin(made, "true"))


@pytest.mark.req("LIF-6")
@pytest.mark.req("LIF-2")
async def test_a_kill_before_the_engine_answered_leaves_nothing(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await daemons.create()
    pid = daemons.agent(made)
    answers = asyncio.Event()
    found = NativeEngine.adopt

    async def slow(self: NativeEngine, spec: Any) -> Any:
        await answers.wait()
        return await found(self, spec)

    monkeypatch.setattr(NativeEngine, "adopt", slow)
    await daemons.restart()
    killing = asyncio.ensure_future(daemons.node.kill(ME, made))
    await until(lambda: daemons.node.roster.live[made].state is SandboxState.ENDING)
    answers.set()
    assert (await killing).ended is not None
    await daemons.gone(made, pid)


@pytest.mark.req("LIF-6")
async def test_a_daemon_that_stops_while_it_adopts_leaves_the_sandbox(daemons: Daemons) -> None:
    made = await daemons.create()
    command = await daemons.begin(made, "sh", "-c", "read line; cat; exit 3", stdin=True)
    pid = daemons.silence(made)
    for _ in range(3):
        await daemons.restart()
        assert (await daemons.node.get(ME, made)).state is SandboxState.RUNNING
    await daemons.node.stop()
    os.kill(pid, signal.SIGCONT)
    await daemons.start()
    await daemons.node.write_stdin(ME, made, command.id, 0, once(b"hello\n"), eof=True)
    end = (await daemons.node.wait_command(ME, made, command.id, 20)).ended
    assert end is not None
    assert (end.reason, end.exit_code) == (EndReason.EXITED, 3)
    assert daemons.agent(made) == pid


@pytest.mark.req("LIF-6")
@pytest.mark.req("RES-2")
@pytest.mark.parametrize(("times", "by"), [({"ttl_s": 60}, "ttl"), ({"idle_timeout_s": 30}, "idle")])
async def test_times_hold_while_it_is_adopted(daemons: Daemons, times: dict[str, float], by: str) -> None:
    made = await daemons.create(**times)
    pid = daemons.silence(made)
    await daemons.restart()
    daemons.clock.pass_s(20)
    daemons.node.context.agenda.run_due()
    assert (await daemons.node.get(ME, made)).state is SandboxState.RUNNING
    daemons.clock.pass_s(60)
    daemons.node.context.agenda.run_due()
    assert await daemons.end_of(made) == (EndReason.TIMED_OUT, by)
    await daemons.gone(made, pid)


@pytest.mark.req("LIF-1")
async def test_a_time_is_extended_while_it_is_adopted(daemons: Daemons) -> None:
    made = await daemons.create(ttl_s=60)
    pid = daemons.silence(made)
    await daemons.restart()
    assert (await daemons.node.extend(ME, made, 1000)).ends_in_s == pytest.approx(1000, abs=1)
    daemons.clock.pass_s(100)
    daemons.node.context.agenda.run_due()
    os.kill(pid, signal.SIGCONT)
    await until(lambda: daemons.node.roster.live[made].channel is not None)
    assert await daemons.run(made, "true") == 0


@pytest.mark.req("LIF-6")
async def test_a_command_is_killed_while_its_sandbox_is_adopted(daemons: Daemons) -> None:
    made = await daemons.create()
    command = await daemons.begin(made, "sleep", "1000")
    pid = daemons.silence(made)
    await daemons.restart()
    killing = asyncio.ensure_future(daemons.node.kill_command(ME, made, command.id))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGCONT)
    end = (await killing).ended
    assert end is not None
    assert (end.reason, end.by) == (EndReason.KILLED, ME.owner)
    assert await daemons.run(made, "true") == 0


@pytest.mark.req("EXE-5")
async def test_a_guest_that_dies_while_it_is_adopted_has_a_typed_end(daemons: Daemons) -> None:
    made = await daemons.create()
    pid = daemons.silence(made)
    await daemons.restart()
    os.kill(pid, signal.SIGKILL)
    assert await daemons.end_of(made) == (EndReason.HOST_FAILURE, None)


@pytest.mark.req("EXE-5")
@pytest.mark.parametrize("failure", [EngineError("keeper_failed", "planned"), KeyError("a defect of ours")], ids=repr)
async def test_an_adoption_that_fails_costs_that_sandbox(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    bad, good = await daemons.create(), await daemons.create()
    found = NativeEngine.adopt

    async def failing(self: NativeEngine, spec: Any) -> Any:
        if spec.id == bad:
            raise failure
        return await found(self, spec)

    monkeypatch.setattr(NativeEngine, "adopt", failing)
    await daemons.restart()
    assert await daemons.end_of(bad) == (EndReason.HOST_FAILURE, None)
    assert await daemons.run(good, "true") == 0


@pytest.mark.req("EXE-5")
async def test_commands_that_cannot_be_restored_cost_their_sandbox_and_leave_nothing(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await daemons.create()
    pid = daemons.agent(made)

    def broken(*_: object) -> None:
        raise KeyError("a defect of ours")

    monkeypatch.setattr(adoption, "_commands", broken)
    await daemons.restart()
    assert await daemons.end_of(made) == (EndReason.HOST_FAILURE, None)
    await daemons.gone(made, pid)


@pytest.mark.req("LIF-6")
async def test_a_decided_end_is_carried_out_by_the_next_daemon(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await daemons.create()
    pid = daemons.agent(made)
    daemons.node.roster.live[made].journal("sandbox.ending", {"why": "killed", "by": "uid:7", "detail": None})
    answers = asyncio.Event()
    found = NativeEngine.adopt

    async def slow(self: NativeEngine, spec: Any) -> Any:
        await answers.wait()
        return await found(self, spec)

    monkeypatch.setattr(NativeEngine, "adopt", slow)
    await daemons.restart()
    assert (await daemons.node.get(ME, made)).state is SandboxState.ENDING
    await raises("sandbox_ended", daemons.begin(made, "true"))
    answers.set()
    assert await daemons.end_of(made) == (EndReason.KILLED, "uid:7")
    await daemons.gone(made, pid)


@pytest.mark.req("LIF-6")
async def test_a_start_that_begins_a_new_journal_file_restates_everybody(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [await daemons.create() for _ in range(3)]
    command = await daemons.begin(made[0], "sleep", "1000")
    await daemons.node.stop()
    defaults = Journal.__init__.__kwdefaults__
    assert defaults is not None
    files = daemons.root / "state" / "journal"
    file = files / f"{1:016}.jsonl"
    monkeypatch.setitem(defaults, "file_bytes_max", file.stat().st_size)  # the next line begins a file
    with file.open("ab") as torn:
        torn.write(b'{"seq":')
    await daemons.start()
    assert len(list(files.iterdir())) == 2, "and no later one"
    monkeypatch.undo()
    await daemons.restart()
    assert {each.id for each in await daemons.node.list(ME, include_ended=True, usage=False)} == set(made)
    assert (await daemons.node.get_command(ME, made[0], command.id)).ended is None
    assert [await daemons.run(each, "true") for each in made] == [0, 0, 0]


@pytest.mark.req("LIF-6")
async def test_who_takes_long_passes_his_turn_on() -> None:
    turns, going_on, done = start.Turns(at_once=2, turn_s=0.05), asyncio.Event(), list[int]()

    async def one(number: int) -> None:
        async with turns.one():
            if number < 4:
                await going_on.wait()
            done.append(number)

    tasks = [asyncio.ensure_future(one(number)) for number in range(8)]
    await until(lambda: done == [4, 5, 6, 7])
    going_on.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert turns._free._value == 2, "no turn was given back twice"


def stop_at(point: str, then: Callable[[], None]) -> Callable[[str], None]:
    def reached(here: str) -> None:
        if here == point:
            then()

    return reached


@pytest.mark.req("RES-2")
async def test_an_end_in_the_turn_in_which_the_guest_answered(
    daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await daemons.create()
    pid = daemons.agent(made)

    def kill() -> None:
        daemons.node.roster.live[made].end(Cause(Why.KILLED, by="uid:7"))

    monkeypatch.setattr(points, "reached", stop_at("node.adopt.during_reset", kill))
    await daemons.restart()
    assert await daemons.end_of(made) == (EndReason.KILLED, "uid:7")
    await daemons.gone(made, pid)
