"""A guest that does its worst: its own sandbox pays, the daemon stays up and bounded, the neighbours do not notice."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import stat
import statistics
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cloche.client import Sandbox
from cloche.wire.errors import ClocheError
from cloche_server.channel.frames import Kind, encode, encode_credit, encode_json, encode_offset
from cloche_server.node.launch.cgroup import version as cgroup_version
from cloche_server.node.launch.up import up
from tests.promises.evil import EvilImages, raw, spec
from tests.promises.nodes import CLI, RealNode, wait_until
from tests.promises.screens import Tty
from tests.promises.traces import traces
from tests.unit.client.hostile_trees import BROKEN as BROKEN_TREES
from tests.unit.client.hostile_trees import TREES
from tests.unit.client.test_extract import picture, rewritten

FULL_TIMEOUT_S = 3600
GROWTH_BYTES_MAX = 64 * 1024 * 1024
SMALL: dict[str, Any] = {"memory_mb": 64, "disk_mb": 64}
ESCAPES = "\x1b[2J\x1b]52;c;aGk=\x07\u202eevil\x9b31m"
OK = encode_json({"ok": {"code": 0}})
OPEN = encode_json({"op": "connect"})

BROKEN: dict[str, list[str]] = {
    "a wrong checksum": [raw(encode(Kind.PONG, 0, b"x")[:-1] + b"\0")],
    "an unknown kind": [raw(encode(200, 0, b"x"))],
    "an oversized frame": [raw(b"\x04" + b"\x04\0\0\0" + b"\xff\xff\xff\xff" + bytes(64))],
    "a frame one byte too long": [raw(b"\x04" + b"\x04\0\0\0" + (131_073).to_bytes(4, "little") + bytes(64))],
    "noise": [raw(bytes((n * 7919 + 11) % 251 + 1 for n in range(4096)))],
    "another protocol": [raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")],
    "a long ping": [spec(Kind.PING, 0, bytes(65))],
    "a long pong": [spec(Kind.PONG, 0, bytes(65))],
    "HELLO again": [spec(Kind.HELLO, 0, encode_json({"gen": 1}))],
    "STATE without RESET": [spec(Kind.STATE, 0, bytes(16) + b"{}")],
    "RESET by the guest": [spec(Kind.RESET, 0, bytes(16))],
    "RESUME by the guest": [spec(Kind.RESUME, 0, bytes(16) + b"{}")],
    "DATA on the channel itself": [spec(Kind.DATA, 0, b"x")],
    "OPEN of a host's id": [spec(Kind.OPEN, 1000, OPEN)],
    "OPEN backwards": [spec(Kind.OPEN, 5, OPEN), spec(Kind.OPEN, 3, OPEN)],
    "OPEN of the same id": [spec(Kind.OPEN, 5, OPEN), spec(Kind.OPEN, 5, OPEN)],
    "OPEN without op": [spec(Kind.OPEN, 1, b"{}")],
    "OPEN that is a list": [spec(Kind.OPEN, 1, b"[]")],
    "OPEN nested deeply": [spec(Kind.OPEN, 1, b'{"op":' + b"[" * 5000 + b"]" * 5000 + b"}")],
    "OPEN that is not JSON": [spec(Kind.OPEN, 1, b'{"op": NaN}')],
    "END of a foreign stream": [spec(Kind.END, 4242, OK)],
    "END twice": [spec(Kind.END, "s", OK), spec(Kind.END, "s", OK)],
    "END of stderr": [spec(Kind.END, "e", OK)],
    "END that is a list": [spec(Kind.END, "s", b"[]")],
    "END with neither": [spec(Kind.END, "s", b'{"x":1}')],
    "OPENED twice": [spec(Kind.OPENED, "s", b"{}")],
    "more data than the limit": [f"{int(Kind.DATA)}:s:z131072"],
    "data after EOF": [spec(Kind.EOF, "s", encode_offset(0)), spec(Kind.DATA, "s", b"x")],
    "EOF of the future": [spec(Kind.EOF, "s", encode_offset(5))],
    "EOF twice": [spec(Kind.EOF, "s", encode_offset(0)), spec(Kind.EOF, "s", encode_offset(0))],
    "EOF too short": [spec(Kind.EOF, "s", b"\0")],
    "credit going back": [spec(Kind.CREDIT, "s", encode_credit(0, 1))],
    "credit for what was not sent": [spec(Kind.CREDIT, "s", encode_credit(99, 99_999))],
    "credit too short": [spec(Kind.CREDIT, "s", b"\0")],
    "CONFIRM of the host's": [spec(Kind.CONFIRM, "s")],
    "ABORT of the host's": [spec(Kind.ABORT, "s", b"{}")],
    "TELL of the host's": [spec(Kind.TELL, "s", b"{}")],
}

FLOODS: dict[str, list[str]] = {
    "pings": [spec(Kind.PING, 0, b"12345678")],
    "pongs": [spec(Kind.PONG, 0, b"x")],
    "late credits": [spec(Kind.CREDIT, 2, encode_credit(0, 1))],
    "equal credits": [spec(Kind.CREDIT, "s", encode_credit(0, 65_536))],
    "empty data": [spec(Kind.DATA, "s")],
    "late frames reordered": [
        spec(Kind.EOF, 2, b""),
        spec(Kind.DATA, 2, b"x"),
        spec(Kind.ABORT, 2),
        spec(Kind.TELL, 2),
    ],
    "all of them": [spec(Kind.PING, 0), spec(Kind.DATA, "s"), spec(Kind.CREDIT, 2, b"?"), spec(Kind.PONG, 0, b"y")],
}


def daemon_peak_bytes(node: RealNode) -> int:
    for line in Path(f"/proc/{node.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def ended(box: Sandbox) -> str:
    """Why it ended, once it has."""
    wait_until(lambda: box.info().ended is not None, 60, f"the end of {box.id}")
    end = box.info().ended
    assert end is not None
    assert (end.detail or "").isprintable(), end.detail
    return end.reason.value


class Neighbour:
    """An honest sandbox of the same node, asked all the time by somebody else."""

    def __init__(self, node: RealNode, pause_s: float = 0.05) -> None:
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._node = node
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        try:
            with self._node.sandbox(**SMALL) as box:
                while not self._stop.wait(self._pause_s):
                    began = time.perf_counter()
                    result = box.run(["echo", "fine"])
                    self.seconds.append(time.perf_counter() - began)
                    if result.stdout != "fine\n":
                        self.failures.append(repr(result))
        except ClocheError as failed:
            self.failures.append(repr(failed))

    def __enter__(self) -> Neighbour:
        self._thread.start()
        wait_until(lambda: self.seconds or self.failures, 60, "the neighbour's first answer")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def __str__(self) -> str:
        ordered = sorted(self.seconds)
        return f"neighbour: {len(ordered)} commands, median {statistics.median(ordered) * 1000:.1f} ms, worst {ordered[-1] * 1000:.0f} ms"


# ---------------------------------------------------------------- frames


@pytest.mark.req("ISO-7")
@pytest.mark.timeout(FULL_TIMEOUT_S)
def test_each_broken_rule_ends_that_sandbox_by_name(
    evil_node: RealNode, evil_image: EvilImages, seed: int, long_run: bool
) -> None:
    chance, image = random.Random(seed), evil_image("serve")
    names = list(BROKEN) if long_run else chance.sample(list(BROKEN), 10)
    with Neighbour(evil_node) as neighbour, evil_node.client() as client:
        boxes = {}
        for name in names:
            boxes[name] = Sandbox.create(image, node=client, **SMALL)
            boxes[name].commands.start(["frames", *BROKEN[name]])
        wrong = {name: why for name, box in boxes.items() if (why := ended(box)) != "protocol_error"}
    assert wrong == {}
    assert neighbour.failures == []
    print(f"\n{len(names)} of {len(BROKEN)} broken rules (seed {seed}): each protocol_error; {neighbour}")


@pytest.mark.req("ISO-7")
@pytest.mark.req("EXE-1")
@pytest.mark.timeout(FULL_TIMEOUT_S)
def test_floods_are_survived_and_bounded(
    evil_node: RealNode, evil_image: EvilImages, seed: int, long_run: bool
) -> None:
    """Frames that break no rule and say nothing, by the million; then 10⁵ streams; then something malformed."""
    frames, opens, noisy = (10_000_000, 1_000_000, 300) if long_run else (200_000, 100_000, 6)
    each = frames // len(FLOODS)
    before, started, done = daemon_peak_bytes(evil_node), time.monotonic(), 0
    with Neighbour(evil_node) as neighbour:
        with evil_node.sandbox(image=evil_image("serve"), **SMALL) as box:
            for name, specs in FLOODS.items():
                result = box.run(["repeat", str(each), *specs], timeout_s=3000)
                assert result.stdout == f"sent {each}\n", (name, result)
                done += each
            assert box.run(["opens", str(opens)], timeout_s=3000).stdout == f"sent {opens}\n"
            done += opens
        reasons: dict[str, int] = {}
        for number in range(noisy):
            with evil_node.sandbox(image=evil_image("serve"), **SMALL) as box:
                box.commands.start(["random", str(seed + number), "10000"])
                reason = ended(box)
                reasons[reason] = reasons.get(reason, 0) + 1
        grown = daemon_peak_bytes(evil_node) - before
    print(
        f"\n{done:,} frames, {noisy} × random frames (seed {seed}) {reasons}, {time.monotonic() - started:.0f} s: "
        f"daemon grew {grown / 1e6:.1f} MB at its peak; {neighbour}"
    )
    assert set(reasons) == {"protocol_error"}
    assert neighbour.failures == []
    assert grown < GROWTH_BYTES_MAX


@pytest.mark.req("ISO-7")
def test_a_guest_that_never_reads_or_never_ends_a_frame_is_held_back(
    evil_node: RealNode, evil_image: EvilImages
) -> None:
    before = daemon_peak_bytes(evil_node)
    with Neighbour(evil_node) as neighbour, evil_node.client() as client:
        boxes = [Sandbox.create(evil_image("serve"), node=client, **SMALL) for _ in range(3)]
        boxes[0].commands.start(["repeat-deaf", "100000000", spec(Kind.PING, 0, bytes(64))])
        boxes[1].commands.start(["endless"])
        boxes[2].commands.start(["stuck"])
        count = len(neighbour.seconds)
        wait_until(lambda: len(neighbour.seconds) > count + 20 or neighbour.failures, 60, "20 answers meanwhile")
        for box in boxes:
            began = time.monotonic()
            box.kill()
            assert ended(box) == "killed"
            assert time.monotonic() - began < 10
    grown = daemon_peak_bytes(evil_node) - before
    print(f"\ndeaf, endless and stuck: daemon grew {grown / 1e6:.1f} MB at its peak; {neighbour}")
    assert neighbour.failures == []
    assert grown < GROWTH_BYTES_MAX


@pytest.mark.req("ISO-7")
def test_streams_that_never_end_are_counted(evil_node: RealNode, evil_image: EvilImages) -> None:
    before = daemon_peak_bytes(evil_node)
    with evil_node.sandbox(image=evil_image("serve"), **SMALL) as box:
        with pytest.raises(ClocheError) as full:
            deque((box.commands.start(["hang"]) for _ in range(600)), maxlen=0)
        assert full.value.code == "overloaded", full.value
        with evil_node.sandbox(**SMALL) as other:
            assert other.run(["echo", "fine"]).stdout == "fine\n"
    assert daemon_peak_bytes(evil_node) - before < GROWTH_BYTES_MAX


STARTS = {
    "exit-at-once": "create_failed",
    "exit-after-hello": "create_failed",
    "hello-noise": "create_failed",
    "hello-twice": "create_failed",
    "gen 2": "guest_too_new",
    "gen 0": "guest_too_old",
    'gen "x"': "create_failed",
    "bind-refused": "create_failed",
}
SLOW_STARTS = {"silent": "create_failed", "hello-endless": "create_failed", "bind-never": "create_failed"}


@pytest.mark.req("ISO-7")
@pytest.mark.timeout(FULL_TIMEOUT_S)
def test_an_agent_that_starts_wrongly_fails_the_create_by_name(
    evil_node: RealNode, evil_image: EvilImages, long_run: bool
) -> None:
    for behaviour, code in {**STARTS, **(SLOW_STARTS if long_run else {})}.items():
        with evil_node.client(request_timeout_s=120) as client, pytest.raises(ClocheError) as failed:
            Sandbox.create(evil_image(behaviour), node=client, **SMALL)
        assert failed.value.code == code, (behaviour, failed.value)
        assert failed.value.message.isprintable(), failed.value.message
        if behaviour == "bind-refused":
            assert "could not prepare the guest" in failed.value.message, failed.value.message
    with evil_node.sandbox(image=evil_image("hello-escapes"), **SMALL) as box:
        assert box.run(["ok"]).stdout == "ok\n"
    with evil_node.client() as client:
        assert [box.id for box in client.list()] == []


STREAM = '{"op":"exec","command":"x","opened":true,"sent":%s,"acked":%s,"received":0,"eof_sent":false,"eof_received":false,"ended":false}'
LIES = {
    "not an object": "[]",
    "streams that are a list": '{"streams":[],"highest_host":4,"highest_guest":0}',
    "no highest": '{"streams":{}}',
    "negative": '{"streams":{"4":' + STREAM % (-1, 0) + '},"highest_host":6,"highest_guest":0}',
    "acked beyond sent": '{"streams":{"4":' + STREAM % (0, 10**18) + '},"highest_host":6,"highest_guest":0}',
    "a stream of a million digits": '{"streams":{"' + "9" * 50_000 + '":{}},"highest_host":6,"highest_guest":0}',
    "above the highest": '{"streams":{"400":' + STREAM % (0, 0) + '},"highest_host":6,"highest_guest":0}',
    "too many": '{"streams":{'
    + ",".join(f'"{n}":' + (STREAM % (0, 0)).replace(',"eof_received":false', "") for n in range(2, 1600, 2))
    + '},"highest_host":1600,"highest_guest":0}',
    "deep": '{"streams":' + "[" * 3000 + "]" * 3000 + "}",
}


@pytest.mark.req("ISO-7")
@pytest.mark.timeout(300)
def test_lies_in_state_end_their_teller_alone(own_evil_node: RealNode, evil_image: EvilImages) -> None:
    node = own_evil_node
    behaviours = {name: f"reset-lies {text}" for name, text in LIES.items()}
    behaviours |= {name: name for name in ("reset-silent", "reset-exit", "reset-garbage", "reset-endless")}
    with node.client() as client:
        boxes = {name: Sandbox.create(evil_image(how), node=client, **SMALL).id for name, how in behaviours.items()}
        for each in boxes.values():
            client.connect(each).commands.start(["hang"])
        honest = Sandbox.create(node=client, **SMALL)
        going_on = honest.commands.start("for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.3; done")
    began = time.monotonic()
    node.restart_daemon()
    up_s = time.monotonic() - began
    with node.client() as client:
        reasons = {name: ended(client.connect(each)) for name, each in boxes.items()}
        over_s = time.monotonic() - began
        again = client.connect(honest.id)
        result = again.commands.get(going_on.id).result()
        assert result.stdout == "".join(f"{n}\n" for n in range(1, 10))
        assert again.run(["echo", "fine"]).stdout == "fine\n"
    print(
        f"\nSTATE lies: {reasons}; daemon up after {up_s:.1f} s, all over after {over_s:.1f} s, {node.daemon_rss_bytes() / 1e6:.0f} MB"
    )
    assert {reasons[name] for name in LIES} == {"protocol_error"}, reasons
    assert reasons["reset-silent"] == "unresponsive"
    assert reasons["reset-endless"] in ("unresponsive", "protocol_error")
    assert reasons["reset-garbage"] in ("unresponsive", "protocol_error")
    assert reasons["reset-exit"] == "host_failure"


@pytest.mark.req("ISO-7")
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_guest_that_answers_nothing_is_ended(evil_node: RealNode, evil_image: EvilImages) -> None:
    with evil_node.sandbox(image=evil_image("serve"), ttl_s=600, **SMALL) as box:
        box.commands.start(["deaf"], timeout_s=1)
        wait_until(lambda: box.info().ended is not None, 200, "the end of a deaf guest")
        assert ended(box) == "unresponsive"


# ---------------------------------------------------------------- a sentry that lies


class FakeEngineNode(RealNode):
    """Its `runsc` is `evil/sentry.c`: no guest ever runs, and the control socket answers as `mode` says."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.plant = base / "plant"
        engine = self.plant / "engine"
        engine.mkdir(parents=True)
        here = Path(__file__).parent / "evil"
        shutil.copyfile(here / "fake_engine_daemon.py", self.plant / "fake_engine_daemon.py")
        argv = ["gcc", "-O2", "-static", "-Wall", "-Werror", "-o", str(engine / "runsc"), str(here / "sentry.c")]
        subprocess.run(argv, check=True)
        self.lie("silent")

    def lie(self, mode: str) -> None:
        (self.plant / "engine" / "mode").write_text(mode)

    def start(self) -> None:
        program = (str(self.plant / "fake_engine_daemon.py"), str(self.plant))
        self.pid = up(self.paths, mode=self.mode, program=program)
        self.starts += 1


@contextmanager
def fake_engine_node() -> Iterator[FakeEngineNode]:
    base = Path(tempfile.mkdtemp(prefix="cloche-fake-"))
    base.chmod(0o755)
    node = FakeEngineNode(base)
    try:
        node.start()
        yield node
    finally:
        node.stop()
        shutil.rmtree(base, ignore_errors=True)


@pytest.mark.req("ISO-7")
@pytest.mark.timeout(600)
def test_a_sentry_that_lies_on_its_control_socket(long_run: bool) -> None:
    modes = ["garbage", "brackets", "braces", "string", "list", "escapes", "closes"]
    with fake_engine_node() as node, node.client(request_timeout_s=120) as client:
        client.info()  # its connection is there before descriptors are counted
        before, peak = traces(node), daemon_peak_bytes(node)
        told = {}
        for mode in modes + (["slow", "silent"] if long_run else []):
            node.lie(mode)
            began, slowest = time.monotonic(), [0.0]
            creating = threading.Thread(target=lambda: told.update({mode: _refusal(node)}))  # noqa: B023
            creating.start()
            while creating.is_alive():
                asked = time.perf_counter()
                client.info()
                slowest.append(time.perf_counter() - asked)
            creating.join()
            print(
                f"\nsentry {mode}: {told[mode]} after {time.monotonic() - began:.1f} s, API at worst {max(slowest) * 1000:.0f} ms"
            )
            assert max(slowest) < 1.0, "the API answers meanwhile"
            assert told[mode].isprintable()
        try:
            wait_until(lambda: traces(node).more_than(before) == {}, 30)
        except AssertionError:
            raise AssertionError(f"left: {traces(node).more_than(before)}") from None
        assert daemon_peak_bytes(node) - peak < GROWTH_BYTES_MAX
        assert all(
            re.match(r"(create_failed|protocol_error|unresponsive|host_failure)\b", text) for text in told.values()
        ), told


def _refusal(node: RealNode) -> str:
    with node.client(request_timeout_s=120) as client:
        try:
            Sandbox.create(node=client, memory_mb=64, disk_mb=64, retain_s=0)
        except ClocheError as failed:
            return f"{failed.code}: {failed.message}"
    return "created"


# ---------------------------------------------------------------- what a terminal shows


def on_a_terminal(node: RealNode, *arguments: str) -> str:
    """All that the command line wrote to a terminal."""
    with Tty([str(CLI), *arguments], node.environment, rows=50, cols=200) as tty:
        tty.wait(60)
        tty.read()
        return tty.seen.decode("utf-8", "backslashreplace")


def assert_harmless(shown: str, what: str) -> None:
    for bad in ("\x1b[2J", "\x1b]52", "\x1b]0;", "\x07", "\u202e", "\x9b"):
        assert bad not in shown, f"{what} shows {bad!r}: {shown!r}"


@pytest.mark.req("ISO-7")
def test_a_guests_words_reach_a_terminal_escaped(evil_node: RealNode, evil_image: EvilImages, tmp_path: Path) -> None:
    error = json.dumps({"error": {"code": "io", "message": ESCAPES}})
    entry = {"name": ESCAPES, "path": "/t", "type": "dir", "size": 0, "mode": 0o755, "uid": 0, "gid": 0, "mtime_ns": 0}
    bad = json.dumps({"ok": {"files": 0, "errors": [{"path": ESCAPES, "code": "io", "message": ESCAPES}]}}).encode()
    files = {
        "t/tree": b"",
        "t/tree.end": bad,
        ".cloche/answers/fs.stat.end": json.dumps({"ok": {"entry": entry}}).encode(),
        ".cloche/answers/file.read.end": error.encode(),
    }
    with evil_node.sandbox(image=evil_image("serve", files), name="liar", **SMALL) as box:
        raw_output = on_a_terminal(evil_node, "exec", "liar", "--", "ok", ESCAPES)
        assert ESCAPES[:4] in raw_output, "exec passes a program's output on as it is"
        command = box.commands.start(["ok", ESCAPES])
        command.wait()
        for what in (
            ["exec", "liar", "--", "end", error],
            ["exec", "liar", "--", "end", json.dumps({"ok": {"code": ESCAPES}})],
            ["logs", "liar"],
            ["ps"],
            ["ps", "--all"],
            ["cp", "liar:/t/tree", str(tmp_path / "copy")],
            ["cp", str(Path(__file__)), "liar:/x"],
        ):
            shown = on_a_terminal(evil_node, *what)
            assert_harmless(shown, " ".join(what))
            if what[0] in ("logs", "cp") or error in what:
                assert "\\x1b" in shown, f"{what}: escaped, not hidden: {shown!r}"
        box.commands.start(["frames", BROKEN["noise"][0]])
        ended(box)
        for what in (["ps", "--all"], ["ps", "--all", "--json"], ["logs", "liar"], ["exec", "liar", "--", "ok"]):
            assert_harmless(on_a_terminal(evil_node, *what), " ".join(what))
    shown = on_a_terminal(evil_node, "create", evil_image("bind-refused"))
    assert_harmless(shown, "create")
    assert "\\x1b" in shown, shown
    assert_harmless(on_a_terminal(evil_node, "exec", f"no{ESCAPES}", "--", "ok"), "an unknown name")


@pytest.mark.req("ISO-7")
def test_hostile_names_of_an_honest_agent_are_escaped_too(evil_node: RealNode, tmp_path: Path) -> None:
    with evil_node.sandbox(name="names", **SMALL) as box:
        script = f"import os; os.makedirs('/tmp/t'); open('/tmp/t/' + {ESCAPES!r}.replace('/', ''), 'w'); os.mkfifo('/tmp/t/' + {ESCAPES!r} + 'p')"
        assert box.run(["python3", "-c", script], check=True).exit_code == 0
        for what in (
            ["cp", "names:/tmp/t", str(tmp_path / "copy")],
            ["cp", f"names:/tmp/t/{ESCAPES}missing", str(tmp_path / "x")],
            ["exec", "names", "--", f"/no/{ESCAPES}"],
        ):
            shown = on_a_terminal(evil_node, *what)
            assert_harmless(shown, " ".join(what))


# ---------------------------------------------------------------- trees out


def prepare(place: Path) -> None:
    """A destination with things of the user's in it, and a neighbour that must not change."""
    shutil.rmtree(place, ignore_errors=True)
    outside = place.parent / "outside"
    if not outside.exists():
        outside.mkdir()
        (outside / "secret").write_text("secret")
    place.mkdir()
    (place / "mine").write_text("mine")
    (place / "mydir").mkdir()
    (place / "mylink").symlink_to(outside)


@pytest.mark.req("FS-2")
@pytest.mark.timeout(FULL_TIMEOUT_S)
def test_hostile_trees_write_nothing_outside_their_place(
    evil_node: RealNode, evil_image: EvilImages, tmp_path: Path, seed: int, long_run: bool
) -> None:
    place = tmp_path / "place"
    prepare(place)
    trees = {**TREES, **BROKEN_TREES}
    assert len(trees) >= 40
    entry = {"name": "t", "path": "/t", "type": "dir", "size": 0, "mode": 0o755, "uid": 0, "gid": 0, "mtime_ns": 0}
    files = {".cloche/answers/fs.stat.end": json.dumps({"ok": {"entry": entry}}).encode()}
    for number, tar in enumerate(trees.values()):
        files[f"t/{number}"] = rewritten(tar, str(tmp_path / "outside"))
    before = picture(tmp_path / "outside")
    by_command = set(range(len(trees)) if long_run else random.Random(seed).sample(range(len(trees)), 6))
    written = 0
    with evil_node.sandbox(image=evil_image("serve", files), name="trees", **SMALL) as box:
        for number, name in enumerate(trees):
            prepare(place)
            if number in by_command:
                done = evil_node.cloche("cp", f"trees:/t/{number}/.", str(place))
                assert done.returncode in (0, 1, 125), (name, done)
                assert b"\x1b" not in done.stderr, (name, done.stderr)
                assert b"Traceback" not in done.stderr, (name, done.stderr)
            else:
                said = ""
                try:
                    box.files.download(f"/t/{number}", place)
                except ClocheError as refused:
                    said = str(refused)
                assert "\x1b" not in said, name
            assert picture(tmp_path / "outside") == before, name
            assert sorted(os.listdir(tmp_path)) == ["outside", "place"], name
            assert stat.S_IMODE((place.stat()).st_mode) & 0o700 == 0o700, name
            for path in place.rglob("*"):
                status = path.lstat()
                assert not status.st_mode & 0o6000 or stat.S_ISLNK(status.st_mode), (name, path)
                assert stat.S_IFMT(status.st_mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK), (name, path)
                if path.is_symlink() and path.name != "mylink":
                    assert Path(os.path.realpath(path)).is_relative_to(os.path.realpath(place)), (
                        name,
                        os.readlink(path),
                    )
                written += 1
        assert box.run(["ok"]).stdout == "ok\n", "and the channel goes on"
    print(f"\n{len(trees)} hostile trees, {len(by_command)} by `cloche cp`: nothing outside; {written} entries inside")


# ---------------------------------------------------------------- a noisy neighbour


def p95(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.95)]


def cpu_used_s(box: Sandbox) -> float:
    """By the host's count."""
    cgroup = box.info().isolation
    assert cgroup is not None
    assert cgroup.cgroup is not None
    return int(Path(cgroup.cgroup.replace("/memory/", "/cpuacct/"), "cpuacct.usage").read_text()) / 1e9


@pytest.mark.req("RES-1")
@pytest.mark.skipif(cgroup_version() != 1, reason="reads the CPU's count where version 1 has it")
@pytest.mark.timeout(FULL_TIMEOUT_S)
def test_a_flooding_neighbour_costs_no_more_than_a_busy_one(
    evil_node: RealNode, evil_image: EvilImages, long_run: bool
) -> None:
    """Flooding and burning by turns, so that the machine's weather is the same for both; the CPU that each got is printed."""
    count, turns = (240, 12) if long_run else (60, 4)
    flood = ["burst", spec(Kind.PING, 0, b"12345678"), spec(Kind.DATA, "s"), spec(Kind.CREDIT, 2, b"?")]
    seconds: dict[str, list[float]] = {"burn": [], "flood": []}
    cpus: dict[str, list[float]] = {"burn": [], "flood": []}
    with evil_node.sandbox(**SMALL) as box:
        box.run(["true"])
        for turn in range(turns):
            for kind in ("burn", "flood") if turn % 2 else ("flood", "burn"):
                with evil_node.sandbox(image=evil_image("serve"), cpus=0.5, **SMALL) as noisy:
                    noisy.commands.start(flood if kind == "flood" else ["burn"])
                    since, cpu_s = time.monotonic(), cpu_used_s(noisy)
                    for number in range(count // turns + 3):
                        began = time.perf_counter()
                        assert box.run(["true"]).exit_code == 0
                        if number >= 3:
                            seconds[kind].append(time.perf_counter() - began)
                    cpus[kind].append((cpu_used_s(noisy) - cpu_s) / (time.monotonic() - since))
    ratio = p95(seconds["flood"]) / p95(seconds["burn"])
    medians = {kind: statistics.median(found) * 1000 for kind, found in seconds.items()}
    print(
        f"\nexec beside a neighbour limited to 0.5 CPU, n = {count}: p95 {p95(seconds['flood']) * 1000:.1f} ms flooding, "
        f"{p95(seconds['burn']) * 1000:.1f} ms burning: {ratio:.2f} (bound 1.3, asserted in --long); "
        f"medians {medians['flood']:.1f} and {medians['burn']:.1f} ms; "
        f"the neighbour got {statistics.mean(cpus['flood']):.2f} and {statistics.mean(cpus['burn']):.2f} CPU"
    )
    assert statistics.mean(cpus["flood"]) > 0.7 * statistics.mean(cpus["burn"]), "else the two are not the same load"
    assert ratio <= (1.3 if long_run else 3.0)
