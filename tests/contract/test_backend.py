"""What every Backend promises, shown on the node with the native agent: commands, output, stdin, lives, ends.

The engine here has no walls (`tests/unit/node/native_engine.py`); the same promises on real sandboxes are in tests/promises.
"""

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloche.wire.commands import Cursor, StartCommand, Terminal
from cloche.wire.ends import EndReason
from cloche.wire.ids import short
from cloche.wire.sandboxes import CreateSandbox, SandboxState
from cloche_server.engines.contract import EngineError
from cloche_server.node import sandbox as sandbox_module
from cloche_server.node.journal import verify
from tests.unit.node.house import ADMIN, ME, OTHER, House, make_images, once, raises, until
from tests.unit.node.native_engine import can_run

pytestmark = pytest.mark.skipif(not can_run(), reason="needs root, unshare and a built agent (just setup)")


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path, make_images(tmp_path))
    await made.node.start()
    yield made
    await made.node.kill_all(ADMIN)
    await made.node.stop()
    verify(tmp_path / "state" / "journal")


# --- commands -----------------------------------------------------------------------------------


@pytest.mark.req("EXE-4")
async def test_create_run_read_kill(house: House) -> None:
    made = await house.create(command=StartCommand(argv=["sh", "-c", "echo out; echo err >&2; exit 3"]), name="first")
    assert (made.state, made.owner, made.image_digest) == (SandboxState.RUNNING, "uid:1000", "sha256:ab")
    assert made.isolation is not None
    assert made.first_command is not None
    ended = await house.node.wait_command(ME, made.id, made.first_command, 10)
    assert ended.ended is not None
    assert (ended.ended.reason, ended.ended.exit_code) == (EndReason.EXITED, 3)
    assert (await house.text(ended, 1), await house.text(ended, 2)) == (b"out\n", b"err\n")
    assert sorted([await house.text(ended)]) in ([b"out\nerr\n"], [b"err\nout\n"])
    killed = await house.node.kill(ME, "first")
    assert killed.ended is not None
    assert (killed.state, killed.ended.reason, killed.ended.by) == (SandboxState.ENDED, EndReason.KILLED, "uid:1000")
    again = await house.node.kill(ME, made.id)
    assert again.ended == killed.ended
    assert await house.text(ended, 1) == b"out\n", "what it printed is still there"


@pytest.mark.req("EXE-5")
async def test_ends_of_commands(house: House) -> None:
    made = await house.create()

    async def end(*argv: str, **more: object) -> tuple[str, int | None, int | None, str | None]:
        ended = (await house.run(made.id, *argv, **more)).ended
        assert ended is not None
        return ended.reason.value, ended.exit_code, ended.signal, ended.error_code

    assert await end("sh", "-c", "exit 7") == ("exited", 7, None, None)
    assert await end("sh", "-c", "kill -SEGV $$") == ("signalled", None, 11, None)
    assert await end("/no/such/program") == ("not_started", None, None, "command_not_found")
    assert await end("/etc/passwd") == ("not_started", None, None, "not_executable")
    assert await end("true", user="nobody-at-all") == ("not_started", None, None, "no_such_user")
    assert await end("sh", "-c", "yes", output_bytes_max=100_000) == ("output_limit", None, 9, None)
    full = (await house.node.list_commands(ME, made.id))[-1]
    assert full.output.end == 100_000
    assert await house.text(full) == b"y\n" * 50_000


@pytest.mark.req("EXE-5")
async def test_a_timeout_and_a_kill_are_told_apart(house: House) -> None:
    made = await house.create()
    slow = await house.node.start_command(ME, made.id, StartCommand(argv=["sleep", "100"], timeout_s=50), None)
    other = await house.node.start_command(ME, made.id, StartCommand(argv=["sleep", "100"]), None)
    house.clock.pass_s(51)
    house.node.context.agenda.run_due()
    timed = (await house.node.wait_command(ME, made.id, slow.id, 10)).ended
    killed = (await house.node.kill_command(ME, made.id, short(other.id))).ended
    assert timed is not None
    assert killed is not None
    assert (timed.reason, timed.by, timed.signal) == (EndReason.TIMED_OUT, "timeout", 9)
    assert (killed.reason, killed.by) == (EndReason.KILLED, "uid:1000")


@pytest.mark.req("EXE-5")
async def test_a_running_command_ends_with_its_sandbox(house: House) -> None:
    made = await house.create()
    command = await house.node.start_command(ME, made.id, StartCommand(argv=["sleep", "100"]), None)
    await house.node.kill(ME, made.id)
    ended = (await house.node.get_command(ME, made.id, command.id)).ended
    assert ended is not None
    assert (ended.reason, ended.by) == (EndReason.KILLED, "sandbox")


@pytest.mark.req("EXE-4")
async def test_commands_are_idempotent_by_key(house: House) -> None:
    made = await house.create()
    request = StartCommand(argv=["sh", "-c", "echo x >> /tmp/cloche-once; cat /tmp/cloche-once"])
    await house.run(made.id, "rm", "-f", "/tmp/cloche-once")
    first, second = await asyncio.gather(*(house.node.start_command(ME, made.id, request, "key-1") for _ in range(2)))
    assert first.id == second.id
    await house.node.wait_command(ME, made.id, first.id, 10)
    for _ in range(sandbox_module.RECENT_MAX + 1):
        await house.run(made.id, "true")
    third = await house.node.start_command(ME, made.id, request, "key-1")
    assert third.id == first.id
    assert await house.text(third) == b"x\n"
    await raises("idempotency_conflict", house.node.start_command(ME, made.id, StartCommand(argv=["true"]), "key-1"))


@pytest.mark.req("EXE-4")
async def test_stdin_by_offset(house: House) -> None:
    made = await house.create()
    cat = await house.node.start_command(ME, made.id, StartCommand(argv=["cat"], stdin=True), None)
    node = house.node
    assert (await node.write_stdin(ME, made.id, cat.id, 0, once(b"hello "), eof=False)).offset == 6
    assert (await node.write_stdin(ME, made.id, cat.id, 3, once(b"lo wor"), eof=False)).offset == 9
    gap = await raises("stdin_offset", node.write_stdin(ME, made.id, cat.id, 100, once(b"x"), eof=False))
    assert gap.detail["offset"] == 9
    state = await node.write_stdin(ME, made.id, cat.id, 9, once(b"l", b"d"), eof=True)
    assert (state.offset, state.closed) == (11, True)
    ended = await node.wait_command(ME, made.id, cat.id, 10)
    assert await house.text(ended) == b"hello world"
    await raises("command_ended", node.write_stdin(ME, made.id, cat.id, 11, once(b"x"), eof=False))
    deaf = await node.start_command(ME, made.id, StartCommand(argv=["sleep", "100"]), None)
    await raises("no_stdin", node.write_stdin(ME, made.id, deaf.id, 0, once(b"x"), eof=False))


@pytest.mark.req("EXE-9")
async def test_stdin_writers_take_turns(house: House) -> None:
    made = await house.create()
    count = await house.node.start_command(ME, made.id, StartCommand(argv=["sha256sum"], stdin=True), None)
    data = os.urandom(3_000_000)

    async def send(offset: int) -> None:
        """Two writers send the same bytes; both get through, and the guest sees each byte once."""
        pieces = (data[at : at + 50_000] for at in range(offset, len(data), 50_000))
        await house.node.write_stdin(ME, made.id, count.id, offset, once(*pieces), eof=False)

    await asyncio.gather(send(0), send(0))
    await house.node.write_stdin(ME, made.id, count.id, len(data), once(), eof=True)
    ended = await house.node.wait_command(ME, made.id, count.id, 10)
    assert (await house.text(ended)).split()[0].decode() == hashlib.sha256(data).hexdigest()


@pytest.mark.req("EXE-2")
async def test_signals_terminals_and_sizes(house: House) -> None:
    made = await house.create()
    script = "trap 'stty size; exit 5' WINCH; stty size; while :; do sleep 0.01; done"
    request = StartCommand(argv=["sh", "-c", script], terminal=Terminal(rows=10, cols=20))
    shell = await house.node.start_command(ME, made.id, request, None)
    running = house.node.roster.live[made.id].running[shell.id]
    await until(lambda: running.log.end > 0)
    await house.node.resize(ME, made.id, shell.id, 30, 40)
    ended = await house.node.wait_command(ME, made.id, shell.id, 10)
    assert await house.text(ended) == b"10 20\r\n30 40\r\n"
    sleep = await house.node.start_command(ME, made.id, StartCommand(argv=["sleep", "100"]), None)
    await raises("no_terminal", house.node.resize(ME, made.id, sleep.id, 1, 1))
    await house.node.signal(ME, made.id, sleep.id, signal.SIGTERM)
    end = (await house.node.wait_command(ME, made.id, sleep.id, 10)).ended
    assert end is not None
    assert (end.reason, end.signal) == (EndReason.SIGNALLED, 15)


# --- output -------------------------------------------------------------------------------------


@pytest.mark.req("EXE-4")
async def test_a_reader_goes_on_from_its_cursor(house: House) -> None:
    made = await house.create()
    command = await house.run(made.id, "sh", "-c", "seq 100000")
    whole = await house.text(command)
    wanted = "".join(f"{n}\n" for n in range(1, 100_001)).encode()
    assert hashlib.sha256(whole).digest() == hashlib.sha256(wanted).digest()
    for start in (0, 1, len(whole) // 2, len(whole)):
        rest = await house.text(command, start=start)
        assert hashlib.sha256(rest).digest() == hashlib.sha256(whole[start:]).digest(), start
    await raises("cursor_ahead", house.chunks(command, start=len(whole) + 1))


@pytest.mark.req("EXE-3")
async def test_no_reader_never_slows_a_command(house: House) -> None:
    made = await house.create()
    command = await house.run(made.id, "sh", "-c", "head -c 50000000 /dev/zero")
    assert command.ended is not None
    assert command.output.end == 50_000_000
    assert command.ended.exit_code == 0


@pytest.mark.req("RES-1")
async def test_drop_oldest_and_block(house: House) -> None:
    made = await house.create()
    dropped = await house.run(made.id, "sh", "-c", "seq 1000000", output_bytes_max=1 << 20, on_full="drop_oldest")
    assert dropped.ended is not None
    assert dropped.ended.exit_code == 0
    assert dropped.output.end - dropped.output.first == 1 << 20
    assert (await house.text(dropped, start=dropped.output.first)).endswith(b"1000000\n")
    await raises("cursor_lost", house.chunks(dropped, start=0))
    request = StartCommand(argv=["sh", "-c", "seq 1000000"], output_bytes_max=1 << 18, on_full="block")
    blocked = await house.node.start_command(ME, made.id, request, None)
    running = house.node.roster.live[made.id].running[blocked.id]
    await until(lambda: running.log.end == 1 << 18)
    await asyncio.sleep(0.1)
    assert not running.ended.done()
    whole = b"".join(
        [
            bytes(chunk.data)
            async for chunk in house.node.output(ME, made.id, blocked.id, Cursor(), follow=True, fd=None)
        ]
    )
    assert whole == "".join(f"{n}\n" for n in range(1, 1_000_001)).encode()
    end = (await house.node.wait_command(ME, made.id, blocked.id, 10)).ended
    assert end is not None
    assert end.exit_code == 0


@pytest.mark.req("RES-1")
async def test_a_blocked_command_can_be_killed(house: House) -> None:
    made = await house.create()
    request = StartCommand(argv=["yes"], output_bytes_max=1 << 16, on_full="block")
    blocked = await house.node.start_command(ME, made.id, request, None)
    running = house.node.roster.live[made.id].running[blocked.id]
    await until(lambda: running.log.end == 1 << 16)
    ended = (await house.node.kill_command(ME, made.id, blocked.id)).ended
    assert ended is not None
    assert ended.reason is EndReason.KILLED


# --- lives --------------------------------------------------------------------------------------


@pytest.mark.req("LIF-1")
async def test_create_is_idempotent_by_key(house: House) -> None:
    request = CreateSandbox(limits={"disk_bytes": 1 << 24})  # type: ignore[arg-type]
    first, second = await asyncio.gather(*(house.node.create(ME, request, "k") for _ in range(2)))
    assert first.id == second.id
    assert len(await house.node.list(ME, include_ended=True, usage=False)) == 1
    await raises("idempotency_conflict", house.node.create(ME, CreateSandbox(), "k"))
    assert (await house.node.create(OTHER, request, "k")).id != first.id


@pytest.mark.req("ISO-3")
async def test_everyone_sees_his_own(house: House) -> None:
    mine = await house.create(name="box")
    theirs = await house.node.create(OTHER, CreateSandbox(name="box", limits={"disk_bytes": 1 << 24}), None)  # type: ignore[arg-type]
    assert [each.id for each in await house.node.list(ME, include_ended=True, usage=False)] == [mine.id]
    assert len(await house.node.list(ADMIN, include_ended=False, usage=True)) == 2
    for text in ("box", mine.id, mine.id[:8], short(mine.id)):
        assert (await house.node.get(ME, text)).id == mine.id
    await raises("not_found", house.node.get(ME, theirs.id))
    await raises("not_found", house.node.kill(ME, theirs.id))
    await raises("not_found", house.node.start_command(ME, theirs.id, StartCommand(argv=["true"]), None))
    await raises("ambiguous", house.node.get(ADMIN, "sloc"))
    await raises("name_taken", house.create(name="box"))
    assert await house.node.kill_all(ME) == 1
    assert (await house.node.get(OTHER, theirs.id)).state is SandboxState.RUNNING


@pytest.mark.req("LIF-1")
@pytest.mark.req("RES-2")
@pytest.mark.parametrize(
    ("times", "passed_s", "by"), [({"ttl_s": 60}, 61, "ttl"), ({"idle_timeout_s": 30}, 31, "idle")]
)
async def test_times_end_a_sandbox_also_when_the_laptop_slept(
    house: House, times: dict[str, float], passed_s: float, by: str
) -> None:
    made = await house.create(**times)
    house.clock.pass_s(passed_s)
    house.node.context.agenda.run_due()
    ended = (await house.node.wait_ended(ME, made.id, 10)).ended
    assert ended is not None
    assert (ended.reason, ended.by) == (EndReason.TIMED_OUT, by)


@pytest.mark.req("LIF-1")
async def test_a_busy_sandbox_is_not_idle_and_extend_never_shortens(house: House) -> None:
    made = await house.create(idle_timeout_s=30, ttl_s=1000)
    await house.node.start_command(ME, made.id, StartCommand(argv=["sleep", "100"]), None)
    house.clock.pass_s(500)
    house.node.context.agenda.run_due()
    assert (await house.node.get(ME, made.id)).state is SandboxState.RUNNING
    assert (await house.node.extend(ME, made.id, 10)).ends_in_s == pytest.approx(500, abs=1)
    assert (await house.node.extend(ME, made.id, 5000)).ends_in_s == pytest.approx(5000, abs=1)


@pytest.mark.req("EXE-5")
async def test_end_with_command(house: House) -> None:
    made = await house.create(command=StartCommand(argv=["sh", "-c", "echo 42; exit 9"]), end_with_command=True)
    ended = (await house.node.wait_ended(ME, made.id, 10)).ended
    assert ended is not None
    assert (ended.reason, ended.exit_code, ended.by) == (EndReason.EXITED, 9, "command")
    assert made.first_command is not None
    assert await house.text(await house.node.get_command(ME, None, made.first_command)) == b"42\n"


@pytest.mark.req("EXE-5")
@pytest.mark.parametrize(("oom_kills", "reason"), [(0, EndReason.HOST_FAILURE), (1, EndReason.OUT_OF_MEMORY)])
async def test_the_death_of_the_engine(house: House, oom_kills: int, reason: EndReason) -> None:
    made = await house.create()
    command = await house.node.start_command(ME, made.id, StartCommand(argv=["sleep", "100"]), None)
    house.engine.oom_kills[made.id] = oom_kills
    os.kill(house.engine.instances[made.id].pid, signal.SIGKILL)
    ended = await house.node.wait_ended(ME, made.id, 10)
    assert ended.ended is not None
    assert ended.ended.reason is reason
    end = (await house.node.get_command(ME, made.id, command.id)).ended
    assert end is not None
    assert end.reason is reason
    await raises("sandbox_ended", house.node.start_command(ME, made.id, StartCommand(argv=["true"]), None))


@pytest.mark.req("EXE-5")
async def test_an_agent_that_stops_answering(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloche_server.node.liveness.PONG_S", 0.05)
    made = await house.create()
    live = house.node.roster.live[made.id]
    os.kill(_agent_of(house, made.id), signal.SIGSTOP)
    for _ in range(2):  # the first look finds bytes since the start
        house.clock.pass_s(61)
        house.node.context.agenda.run_due()
    ended = await asyncio.wait_for(asyncio.shield(live.ended), 10)
    assert ended.reason is EndReason.UNRESPONSIVE


def _agent_of(house: House, sandbox: str) -> int:
    parent = house.engine.instances[sandbox].pid
    return int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])


@pytest.mark.req("EXE-5")
async def test_an_agent_that_breaks_the_contract(tmp_path: Path) -> None:
    liar = "import os; os.write(0, open('/proc/self/cmdline','rb').read()); os.read(0, 100000)"
    house = House(tmp_path, make_images(tmp_path))
    house.engine._argv = ["python3", "-c", liar]
    await house.node.start()
    await raises("create_failed", house.create())
    assert (await house.node.list(ME, include_ended=True, usage=False)) == []
    await house.node.stop()


@pytest.mark.req("LIF-2")
async def test_a_create_that_fails_leaves_nothing(house: House) -> None:
    house.engine.fail_boot = EngineError("keeper_failed", "planned")
    await raises("keeper_failed", house.create(name="box"))
    house.engine.fail_boot = None
    assert (await house.node.list(ME, include_ended=True, usage=False)) == []
    assert house.node.context.store.sandboxes() == []
    await house.create(name="box")
    await raises("image_not_found", house.create(image="nope", pull="never"))
    await raises("isolation_unavailable", house.create(isolation="microvm"))


@pytest.mark.req("RES-1")
async def test_an_overloaded_node_refuses_and_running_ones_go_on(tmp_path: Path) -> None:
    house = House(tmp_path, make_images(tmp_path), sandboxes_max=1)
    await house.node.start()
    made = await house.create()
    refused = await raises("overloaded", house.create())
    assert refused.retry_after_s
    assert (await house.run(made.id, "true")).ended is not None
    await house.node.kill(ME, made.id)
    await house.node.kill(ME, (await house.create()).id)
    await house.node.stop()


@pytest.mark.req("LIF-1")
async def test_retention_and_prune(house: House) -> None:
    kept, gone = await house.create(retain_s=100), await house.create(retain_s=0)
    await house.node.kill_all(ME)
    assert [each.id for each in await house.node.list(ME, include_ended=True, usage=False)] == [kept.id]
    await raises("not_found", house.node.get(ME, gone.id))
    assert (await house.node.disk_use(ME)).ended_sandboxes == 1
    assert (await house.node.prune(OTHER)).sandboxes == 0
    assert (await house.node.prune(ME)).sandboxes == 1
    assert house.node.context.store.sandboxes() == []


@pytest.mark.req("ISO-3")
async def test_events_are_the_owners(house: House) -> None:
    made = await house.create()
    await house.run(made.id, "echo", "secret")
    mine = (await house.node.events(ME, made.id, after=0, limit=100)).events
    assert [event.kind for event in mine] == [
        "sandbox.creating",
        "sandbox.running",
        "command.starting",
        "command.ended",
    ]
    assert (await house.node.events(OTHER, None, after=0, limit=100)).events == []
    assert "secret" not in (house.root / "state" / "journal" / f"{1:016}.jsonl").read_text()
