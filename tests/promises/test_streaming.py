"""EXE-3 and EXE-4: output at the command's own speed, whoever reads; and every reader goes on where he was."""

from __future__ import annotations

import hashlib
import json
import statistics
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.client import Command, Sandbox
from cloche.errors import ClocheError, CursorAhead, CursorLost, NotFound
from tests.promises import reader
from tests.promises.nodes import CLI, RealNode, wait_until
from tests.promises.wires import MIB, Wire, peak_of, sha256, writer, written

READERS = ("none", "fast", "slow")
RATIO_MAX = 1.35
ROUNDS_MIN, ROUNDS_MAX = 3, 8
GROWN_MAX = 64 * MIB
ASLEEP = 8


@pytest.fixture(scope="module")
def box(node: RealNode) -> Iterator[Sandbox]:
    with node.sandbox(ttl_s=3600) as made:
        yield made


def output_path(job: Command) -> str:
    return f"/v1/sandboxes/{job.view.sandbox}/commands/{job.id}/output"


# -------------------------------------------------------------------- speed


def read_raw(node: RealNode, job: Command, rate: float | None) -> str:
    """The hash of a raw body that follows; `rate`: so many bytes a second until the command has ended."""
    digest, start, got, asked = hashlib.sha256(), time.monotonic(), 0, 0
    wire = Wire(node, 300)
    response = wire.ask(f"{output_path(job)}?follow=true")
    while data := response.read1(256 * 1024):
        digest.update(data)
        got += len(data)
        if rate is not None and got >= asked + MIB:
            asked, due = got, start + got / rate
            wait_until(lambda due=due: time.monotonic() >= due, 60)
            rate = None if job.info().ended else rate
    wire.close()
    return digest.hexdigest()


def timed(node: RealNode, box: Sandbox, kind: str, mib: int, seed: int, rate: float) -> tuple[float, str]:
    """How long the command took, and the hash of what a reader of that kind got."""
    job = box.commands.start(writer(mib, seed), output_bytes_max=2 * mib * MIB)
    if kind == "none":
        job.wait(300)
    digest = read_raw(node, job, rate if kind == "slow" else None)
    end = job.wait(300)
    assert (str(end.reason), end.exit_code) == ("exited", 0)
    took = job.info().runtime_s
    assert took is not None
    return took, digest


@pytest.mark.req("EXE-3")
@pytest.mark.alone
@pytest.mark.timeout(1500)
def test_the_command_is_as_fast_whoever_reads(node: RealNode, seed: int, long_run: bool) -> None:
    """The fastest of some rounds: what else this machine does only ever adds time.

    The command has a quarter of a processor, so that it does not compete with its reader for one.
    """
    mib = 1024 if long_run else 256  # less, and a tenth of a second of the quota is a tenth of the whole
    expected = sha256(written(mib, seed))
    took: dict[str, list[float]] = {kind: [] for kind in READERS}
    ratios: dict[str, float] = {}
    grown = 0
    for number in range(ROUNDS_MAX):
        with node.sandbox(retain_s=0, ttl_s=3600, cpus=0.25) as box, peak_of(node.pid) as peak:
            box.run(writer(4, seed))  # nobody is the first to load the interpreter
            for kind in (*READERS[number % 3 :], *READERS[: number % 3]):
                rate = mib * MIB / (10 * min(took["fast"] or [1.0]))
                seconds, digest = timed(node, box, kind, mib, seed, rate)
                assert digest == expected, kind
                took[kind].append(seconds)
        grown = max(grown, peak.grown)
        ratios = {kind: min(took[kind]) / min(took["none"]) for kind in READERS}
        if number + 1 >= ROUNDS_MIN and max(ratios.values()) <= RATIO_MAX:
            break
    for kind in READERS:
        best, middle = min(took[kind]), statistics.median(took[kind])
        shown = f"best {best:.2f} s ({mib / best:.0f} MiB/s), median {middle:.2f} s, {ratios[kind]:.2f} of none"
        print(f"{mib} MiB, reader {kind}: {shown}, {len(took[kind])} rounds")
    print(f"the daemon grew by at most {grown / MIB:.1f} MiB")
    assert max(ratios.values()) <= RATIO_MAX, took
    assert grown < GROWN_MAX


@pytest.mark.req("EXE-3")
@pytest.mark.timeout(900)
def test_the_sdk_and_many_readers_at_once_get_the_same(node: RealNode, box: Sandbox, seed: int, long_run: bool) -> None:
    mib = 256 if long_run else 24
    with peak_of(node.pid) as peak:
        job = box.commands.start(writer(mib, seed), output_bytes_max=mib * MIB)
        asleep = [Wire(node).ask(f"{output_path(job)}?follow=true") for _ in range(ASLEEP)]  # and never read
        start = time.monotonic()
        assert sha256(chunk.data for chunk in job.output()) == sha256(written(mib, seed))
        took = time.monotonic() - start
    for response in asleep:
        response.close()
    print(
        f"SDK: {mib / took:.0f} MiB/s beside {ASLEEP} readers that stand still; the daemon grew {peak.grown / MIB:.1f} MiB"
    )
    assert peak.grown < GROWN_MAX


# -------------------------------------------------------------------- a full log


@pytest.mark.req("EXE-3")
def test_on_full_end(node: RealNode, box: Sandbox, seed: int) -> None:
    result = box.run(writer(4, seed), output_bytes_max=MIB + 12345)
    assert str(result.ended) == "output_limit"
    assert result.stdout_bytes == b"".join(written(4, seed))[: MIB + 12345]
    exact = box.run(writer(2, seed), output_bytes_max=2 * MIB)
    assert (str(exact.ended), exact.exit_code, len(exact.stdout_bytes)) == ("exited", 0, 2 * MIB)


@pytest.mark.req("EXE-3")
def test_on_full_end_on_the_command_line(node: RealNode, seed: int) -> None:
    """64 MiB, the default."""
    done = node.cloche("run", "--", *writer(65, seed))
    assert done.returncode == 153
    assert done.stdout == b"".join(written(64, seed))
    assert b"output_limit" in done.stderr


@pytest.mark.req("EXE-3")
def test_on_full_block(box: Sandbox, seed: int) -> None:
    """Nobody reads: it stands still, and goes on with each reader who does; what he has not passed is kept."""
    mib = 40
    job = box.commands.start(writer(mib, seed), output_bytes_max=MIB, on_full="block")
    wait_until(lambda: job.info().output.end == MIB, what="the log is full")
    parts: list[bytes] = []
    cursor, passed = "1.0", 0
    for chunk in job.output():
        parts.append(chunk.data)
        cursor, passed = str(chunk.cursor), chunk.cursor.offset
        if chunk.cursor.offset >= 5 * MIB:
            break
    wait_until(lambda: stands_still(job), what="the command waits again")
    assert job.info().ended is None
    # 2.5 to 5 MiB in a hundred tries: the log, both buffers of the connection, and what goes on until he is known to be gone.
    assert job.info().output.end <= passed + 6 * MIB, "what was on its way to the reader who left, and the log"
    parts += [chunk.data for chunk in job.output(from_=cursor)]
    assert b"".join(parts) == b"".join(written(mib, seed))
    assert (str(job.wait(30).reason), job.exit_code) == ("exited", 0)


def stands_still(job: Command) -> bool:
    """No byte came during a quarter of a second."""
    end, until = job.info().output.end, time.monotonic() + 0.25
    wait_until(lambda: time.monotonic() >= until)
    return job.info().output.end == end


@pytest.mark.req("EXE-3")
def test_on_full_drop_oldest(box: Sandbox, seed: int) -> None:
    mib, kept = 12, 2 * MIB + 777
    whole = b"".join(written(mib, seed))
    job = box.commands.start(writer(mib, seed), output_bytes_max=kept, on_full="drop_oldest")
    assert (str(job.wait(60).reason), job.exit_code) == ("exited", 0)
    with pytest.raises(CursorLost) as lost:
        list(job.output())
    first = lost.value.detail["first"]
    assert first == len(whole) - kept == job.info().output.first
    assert b"".join(chunk.data for chunk in job.output(from_=str(first))) == whole[first:]
    with pytest.raises(CursorLost):
        list(job.output(from_=str(first - 1)))
    late = list(job.output(from_=str(len(whole) - 5)))
    assert b"".join(chunk.data for chunk in late) == whole[-5:]


@pytest.mark.req("EXE-3")
def test_a_follower_of_drop_oldest_who_is_too_slow_is_told(node: RealNode, box: Sandbox, seed: int) -> None:
    mib = 48
    job = box.commands.start(writer(mib, seed), output_bytes_max=MIB, on_full="drop_oldest")
    chunks = job.output()
    parts = [next(chunks).data]
    job_end = box.commands.get(job.id).wait(60)  # all the while nobody takes what the stream holds
    assert str(job_end.reason) == "exited"
    with pytest.raises(CursorLost) as lost:
        parts.extend(chunk.data for chunk in chunks)
    whole = b"".join(written(mib, seed))
    got = b"".join(parts)
    assert got == whole[: len(got)]
    first = lost.value.detail["first"]
    assert first == len(whole) - MIB
    assert b"".join(chunk.data for chunk in job.output(from_=str(first))) == whole[first:]
    print(f"told after {len(got)} bytes that {first - len(got)} are lost")


# -------------------------------------------------------------------- readers who come back


@pytest.mark.req("EXE-4")
@pytest.mark.timeout(600)
def test_a_killed_reader_goes_on_from_its_cursor(
    node: RealNode, box: Sandbox, seed: int, long_run: bool, tmp_path: Path
) -> None:
    mib = 1024 if long_run else 48
    kills = 5 if long_run else 3
    job = box.commands.start(writer(mib, seed), output_bytes_max=mib * MIB)
    url = node.environment["CLOCHE_URL"]
    argv = [sys.executable, str(Path(reader.__file__)), url, box.id, job.id, str(tmp_path)]
    data, sizes = tmp_path / "data", []
    for number in range(1, kills + 1):
        goal = mib * MIB * number // (kills + 1)
        process = subprocess.Popen(argv)
        wait_until(lambda goal=goal: data.exists() and data.stat().st_size >= goal, 300)
        process.kill()
        assert process.wait() == -9, "it was killed, and not done"
        sizes.append(data.stat().st_size)
    subprocess.run(argv, check=True, timeout=300)
    assert data.stat().st_size == mib * MIB
    with data.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == sha256(written(mib, seed))
    print(f"killed at {[round(size / MIB, 1) for size in sizes]} of {mib} MiB")


@pytest.mark.req("EXE-4")
def test_a_command_outlives_the_program_that_started_it(node: RealNode, seed: int, tmp_path: Path) -> None:
    """`cloche run` killed half-way; `cloche logs -f --from` has the rest."""
    mib, got = 16, tmp_path / "got"
    with got.open("wb") as file:
        argv = [str(CLI), "run", "--name", "outlives", "--", *writer(mib, seed, delay_s=0.1)]
        process = subprocess.Popen(argv, env=node.environment, stdout=file)
        wait_until(lambda: got.stat().st_size >= 5 * MIB, 60)
        process.kill()
        process.wait()
    have = got.stat().st_size
    assert have < mib * MIB
    done = node.cloche("logs", "-f", "--from", str(have), "outlives")
    assert done.returncode == 0, done.stderr
    assert got.read_bytes() + done.stdout == b"".join(written(mib, seed))
    print(f"{have} bytes, and {len(done.stdout)} from another program")


def events_of(response: object) -> Iterator[tuple[str, str, bytes]]:
    """(event, id, data) of a stream of server-sent events, read as the standard says."""
    fields: dict[str, str] = {}
    while line := response.readline():  # type: ignore[attr-defined]
        text = line.decode().rstrip("\r\n")
        if text and not text.startswith(":"):
            name, _, value = text.partition(": ")
            fields[name] = value
        elif not text and fields:
            yield fields.get("event", ""), fields.get("id", ""), fields.get("data", "").encode()
            fields = {}


@pytest.mark.req("EXE-4")
def test_events_resume_by_last_event_id(node: RealNode, box: Sandbox, seed: int) -> None:
    mib = 6
    job = box.commands.start(writer(mib, seed, delay_s=0.02), output_bytes_max=mib * MIB)
    whole, got, last, connections = b"".join(written(mib, seed)), b"", "1.0", 0
    ended: dict[str, object] = {}
    while not ended:
        wire, here = Wire(node), 0
        connections += 1
        # `from` says something else: the header goes before it.
        response = wire.ask(
            f"{output_path(job)}?follow=true&from=7", Accept="text/event-stream", **{"Last-Event-ID": last}
        )
        assert response.getheader("content-type") == "text/event-stream"
        for name, cursor, data in events_of(response):
            if name == "end":
                ended = json.loads(data)["ended"]
                break
            assert name == "stdout"
            got += b64decode(data, validate=True)
            assert cursor == f"1.{len(got)}"
            last, here = cursor, here + len(data)
            if here > MIB:
                break  # and hang up
        wire.close()
    assert got == whole
    assert (ended["reason"], ended["exit_code"]) == ("exited", 0)
    print(f"{connections} connections")
    assert connections > 4


@pytest.mark.req("EXE-4")
def test_a_raw_body_begins_where_it_is_told(node: RealNode, box: Sandbox, seed: int) -> None:
    job = box.commands.start(["sh", "-c", "printf abc; printf ERR >&2; printf def"], output_bytes_max=MIB)
    job.wait(30)
    wire = Wire(node)

    def ask(query: str) -> tuple[int, str | None, bytes]:
        response = wire.ask(f"{output_path(job)}?{query}")
        return response.status, response.getheader("cloche-cursor"), response.read()

    everything = ask("")[2]
    assert sorted(everything) == sorted(b"abcERRdef")
    for start in range(10):
        assert ask(f"from={start}") == (200, f"1.{start}", everything[start:])
        assert ask(f"from=1.{start}&follow=true")[2] == everything[start:]
    assert (ask("fd=1")[2], ask("fd=2")[2]) == (b"abcdef", b"ERR")
    status, _, body = ask("from=10")
    assert (status, json.loads(body)["code"]) == (416, "cursor_ahead")
    assert ask("from=x")[0] == 400
    with pytest.raises(CursorAhead):
        list(job.output(from_="2.0"))


@pytest.mark.req("EXE-4")
def test_output_outlives_sandbox_and_daemon(own_node: RealNode, seed: int) -> None:
    mib = 8
    whole = b"".join(written(mib, seed))
    with own_node.sandbox() as box, own_node.sandbox(retain_s=0) as forgotten:
        job = box.commands.start(writer(mib, seed), output_bytes_max=mib * MIB)
        job.wait(60)
        brief = forgotten.commands.start("echo brief")
        brief.wait(60)
    for restarted in (False, True):
        if restarted:
            own_node.restart_daemon()
        with own_node.client() as node:
            kept = node.connect(box.id)
            assert kept.view.ended is not None
            again = kept.commands.get(job.id)
            assert (str(again.ended.reason), again.exit_code) == ("exited", 0) if again.ended else False
            assert b"".join(chunk.data for chunk in again.output()) == whole
            middle = b"".join(chunk.data for chunk in again.output(from_=f"1.{5 * MIB + 1}", follow=False))
            assert middle == whole[5 * MIB + 1 :]
            with pytest.raises(NotFound):
                node.connect(forgotten.id)
    assert own_node.cloche("logs", job.id).stdout == whole
    with pytest.raises(ClocheError) as refused, own_node.client() as node:
        node.connect(box.id).commands.start("true")
    assert refused.value.code == "sandbox_ended"


@pytest.mark.req("EXE-4")
def test_a_follower_reads_on_over_a_new_daemon(own_node: RealNode, seed: int) -> None:
    """The same loop over the same object: the SDK makes the connection again by itself."""
    mib = 12
    with own_node.sandbox() as box:
        job = box.commands.start(writer(mib, seed, delay_s=0.05), output_bytes_max=mib * MIB)
        got, restarted = [], 0
        for chunk in job.output():
            got.append(chunk.data)
            if chunk.cursor.offset > (restarted + 1) * 4 * MIB and restarted < 2:
                own_node.restart_daemon()
                restarted += 1
        assert restarted == 2
        assert b"".join(got) == b"".join(written(mib, seed))
        assert job.exit_code == 0
