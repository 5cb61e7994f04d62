"""The log of one command: bytes in order, descriptors apart, limits, and every crash."""

import asyncio
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloche.wire.commands import Cursor
from cloche.wire.errors import ClocheError
from cloche_server.node.command_log import INDEX_BYTES_FREE, PUNCH_BYTES, CommandLog, LogBroken
from cloche_server.node.log_index import ENTRY, HEADER
from cloche_server.node.log_reader import STDERR, STDOUT

MIB = 1024 * 1024
Writes = list[tuple[int, bytes]]


def make(path: Path, bytes_max: int = 64 * MIB, on_full: str = "end") -> CommandLog:
    path.mkdir(parents=True, exist_ok=True)
    return CommandLog.create(path, bytes_max=bytes_max, on_full=on_full)  # type: ignore[arg-type]


def contents(log: CommandLog, fd: int | None = None, start: int = 0) -> bytes:
    with log.reader(Cursor(offset=start), fd=fd) as reader:
        pieces = []
        while (found := reader.read(100)) is not None:
            pieces.append(found[2])
        return b"".join(pieces)


def runs(log: CommandLog) -> list[tuple[int, int, bytes]]:
    with log.reader(Cursor()) as reader:
        return list(iter(reader.read, None))


@pytest.mark.req("EXE-4")
def test_transcript(tmp_path: Path) -> None:
    log = make(tmp_path)
    assert log.append(STDOUT, [b"one ", memoryview(b"two\n")]) == 8
    assert log.append(STDERR, [b"oops\n"]) == 5
    assert log.append(STDOUT, [b"three\n"]) == 6
    assert runs(log) == [(0, 1, b"one two\n"), (8, 2, b"oops\n"), (13, 1, b"three\n")]
    assert contents(log, STDOUT) == b"one two\nthree\n"
    assert contents(log, STDERR) == b"oops\n"
    assert contents(log, start=10) == b"ps\nthree\n"
    assert (log.logged(STDOUT), log.logged(STDERR), log.end) == (14, 5, 19)
    assert (tmp_path / "output").read_bytes() == b"one two\noops\nthree\n"


def test_a_reader_goes_on_while_the_log_grows(tmp_path: Path) -> None:
    log = make(tmp_path)
    with log.reader(Cursor()) as reader:
        assert reader.read() is None
        log.append(STDERR, [b"a"])
        assert reader.read() == (0, 2, b"a")
        log.append(STDERR, [b"b"])
        log.append(STDOUT, [b"c"])
        assert reader.read() == (1, 2, b"b")
        assert reader.read() == (2, 1, b"c")
        assert reader.read() is None


async def test_following_waits_without_polling(tmp_path: Path) -> None:
    log = make(tmp_path)
    waiting = asyncio.ensure_future(log.changed())
    await asyncio.sleep(0)
    assert not waiting.done()
    log.append(STDOUT, [b"x"])
    await asyncio.wait_for(waiting, 1)
    waiting = asyncio.ensure_future(log.changed())
    await asyncio.sleep(0)
    log.finish()
    await asyncio.wait_for(waiting, 1)


@pytest.mark.req("EXE-4")
def test_errors_of_a_cursor_have_names(tmp_path: Path) -> None:
    log = make(tmp_path)
    log.append(STDOUT, [b"hello"])
    with pytest.raises(ClocheError) as ahead:
        log.reader(Cursor(offset=6))
    assert (ahead.value.code, ahead.value.detail["end"]) == ("cursor_ahead", 5)
    log.branch(2)
    assert (log.generation, log.end, contents_of_generation(log)) == (2, 2, b"he")
    with pytest.raises(ClocheError) as rolled:
        log.reader(Cursor(generation=1, offset=0))
    assert (rolled.value.code, rolled.value.detail["generation"]) == ("rolled_back", 2)
    log.append(STDOUT, [b"y"])
    again = CommandLog.recover(tmp_path, bytes_max=MIB, on_full="end")
    assert (again.generation, contents_of_generation(again)) == (2, b"hey")


def contents_of_generation(log: CommandLog) -> bytes:
    with log.reader(Cursor(generation=log.generation)) as reader:
        return b"".join(found[2] for found in iter(reader.read, None))


@pytest.mark.req("RES-1")
def test_end_keeps_exactly_the_limit(tmp_path: Path) -> None:
    log = make(tmp_path, bytes_max=10)
    assert log.append(STDOUT, [b"12345678"]) == 8
    assert log.append(STDERR, [b"abcdef"]) == 2
    assert log.append(STDOUT, [b"x"]) == 0
    assert contents(log) == b"12345678ab"
    assert make(tmp_path / "none", bytes_max=0).append(STDOUT, [b"x"]) == 0


@pytest.mark.req("RES-1")
def test_a_guest_that_alternates_pays_for_its_index(tmp_path: Path) -> None:
    log = make(tmp_path, bytes_max=100_000)
    taken = 0
    while log.append(STDOUT + taken % 2, [b"x"]):
        taken += 1
    assert taken < 100_000 / 10
    assert (tmp_path / "index").stat().st_size <= 100_000 + INDEX_BYTES_FREE + HEADER.size + ENTRY.size


@pytest.mark.req("RES-1")
def test_drop_oldest_keeps_the_newest_and_frees_the_disk(tmp_path: Path) -> None:
    log = make(tmp_path, bytes_max=MIB, on_full="drop_oldest")
    block = bytes(range(256)) * 256
    for number in range(100):
        assert log.append(STDOUT + number % 2, [block]) == len(block)
    assert log.end - log.first == MIB
    assert (tmp_path / "output").stat().st_blocks * 512 <= MIB + PUNCH_BYTES + 65536
    with pytest.raises(ClocheError) as lost:
        log.reader(Cursor(offset=log.first - 1))
    assert (lost.value.code, lost.value.detail["first"]) == ("cursor_lost", log.first)
    assert contents(log, start=log.first) == block * 16
    again = CommandLog.recover(tmp_path, bytes_max=MIB, on_full="drop_oldest")
    assert (again.first, again.end, contents(again, start=again.first)) == (log.first, log.end, block * 16)
    assert (again.logged(1), again.logged(2)) == (log.logged(1), log.logged(2))


@pytest.mark.req("RES-1")
def test_drop_oldest_is_bounded_when_the_guest_alternates(tmp_path: Path) -> None:
    log = make(tmp_path, bytes_max=200_000, on_full="drop_oldest")
    for number in range(60_000):
        log.append(STDOUT + number % 2, [b"xy"])
    disk = sum((tmp_path / name).stat().st_blocks * 512 for name in ("output", "index"))
    assert disk <= 2 * 200_000 + PUNCH_BYTES
    again = CommandLog.recover(tmp_path, bytes_max=200_000, on_full="drop_oldest")
    assert (again.logged(1), again.logged(2)) == (60_000, 60_000)
    assert set(contents(again, start=again.first)) <= set(b"xy")


def test_a_slow_reader_of_drop_oldest_is_told(tmp_path: Path) -> None:
    log = make(tmp_path, bytes_max=1000, on_full="drop_oldest")
    log.append(STDOUT, [b"a" * 1000])
    with log.reader(Cursor()) as reader:
        assert reader.read(10) == (0, 1, b"a" * 10)
        log.append(STDOUT, [b"b" * 900])
        with pytest.raises(ClocheError) as lost:
            reader.read()
    assert lost.value.code == "cursor_lost"


def test_block_waits_for_its_reader_and_keeps_a_margin(tmp_path: Path) -> None:
    log = make(tmp_path, bytes_max=1000, on_full="block")
    rooms = []
    log.on_room = lambda: rooms.append(log.room(STDOUT))
    assert log.append(STDOUT, [b"a" * 1500]) == 1000
    assert log.append(STDOUT, [b"x"]) == 0
    with log.reader(Cursor()) as still:  # one that does not follow frees nothing
        still.read()
    assert log.room(STDOUT) == 0
    with log.reader(Cursor(), follows=True) as reader:
        reader.read(800)
        assert rooms[-1] == 800, "what was passed counts no more"
        assert log.append(STDOUT, [b"b" * 900]) == 800
    assert log.first == 0, "and is kept for a reader that comes back"
    with log.reader(Cursor(offset=900), follows=True):
        assert log.room(STDOUT, wanted=700) == 100, "`from=` says that all before it has arrived"
    assert log.first == 900
    assert contents(log, start=log.first) == b"a" * 100 + b"b" * 800


@st.composite
def histories(draw: st.DrawFn) -> Writes:
    return draw(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(min_size=1, max_size=9)), max_size=8))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories())
@pytest.mark.req("LIF-6")
def test_killed_at_every_byte(tmp_path: Path, history: Writes) -> None:
    """The writer is killed after any byte of any write: what is recovered is a prefix, per descriptor, and goes on."""
    shutil.rmtree(tmp_path / "log", ignore_errors=True)
    states = _file_states(tmp_path / "log", history)
    whole = {fd: b"".join(data for each, data in history if each == fd) for fd in (1, 2)}
    for index, output in states:
        broken = tmp_path / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        broken.mkdir()
        (broken / "index").write_bytes(index)
        (broken / "output").write_bytes(output)
        log = CommandLog.recover(broken, bytes_max=MIB, on_full="end")
        assert log.end == len(output)
        for fd in (1, 2):
            assert contents(log, fd) == whole[fd][: log.logged(fd)]
        for fd in (2, 1):
            log.append(fd, [whole[fd][log.logged(fd) :]])
            assert contents(log, fd) == whole[fd]
        log.close()


def _file_states(path: Path, history: Writes) -> list[tuple[bytes, bytes]]:
    """Every pair of file contents that a kill can leave, in the order in which the kernel gets the bytes."""
    log = make(path)
    index, output = b"", b""
    states = [(index, output)]
    for fd, data in history:
        log.append(fd, [data])
        after = (path / "index").read_bytes()
        states += [(after[:size], output) for size in range(len(index), len(after) + 1)]
        states += [(after, output + data[:size]) for size in range(len(data) + 1)]
        index, output = after, output + data
    log.close()
    return states


def test_impossible_files_have_a_name(tmp_path: Path) -> None:
    make(tmp_path).append(STDOUT, [b"abc"])
    (tmp_path / "index").write_bytes(b"")
    with pytest.raises(LogBroken):
        CommandLog.recover(tmp_path, bytes_max=MIB, on_full="end")


def test_descriptors_are_closed_after_the_last_reader(tmp_path: Path) -> None:
    log = make(tmp_path)
    log.append(STDOUT, [b"abc"])
    with log.reader(Cursor()) as reader:
        log.finish()
        assert reader.read() == (0, 1, b"abc")
    assert log._fds is None
    assert contents(log) == b"abc"
    assert log._fds is None
