"""A new daemon after the last one was killed: nothing lost, nothing twice, every end typed."""

import hashlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche_server.node.adoption import PastCommand, PastSandbox, Replay
from cloche_server.node.journal import Line, verify
from cloche_server.node.lifecycle import Cause, Why
from tests.unit.node.native_engine import ROOT, Holder, can_run

native = pytest.mark.skipif(not can_run(), reason="needs root, unshare and a built agent (just setup)")
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable


def line(kind: str, command: str | None = None, sandbox: str = "s1", **detail: object) -> Line:
    return Line(seq=1, boot_ns=0, wall=0.0, kind=kind, sandbox=sandbox, command=command, detail=detail, prev="")


@pytest.mark.req("LIF-6")
def test_replay_tells_how_far_each_came() -> None:
    replay = Replay(
        [
            Line(seq=1, boot_ns=0, wall=0.0, kind="node.started", detail={"boot_id": "b"}, prev=""),
            line("sandbox.creating"),
            line("sandbox.running"),
            line("sandbox.extended", ttl_deadline_ns=77),
            line("command.starting", "c1", stream=4),
            line("command.starting", "c2", stream=8),
            line("command.ending", "c2", why="timeout", by=None, detail=None),
            line("command.stdin_closed", "c2", offset=3),
            line("command.ended", "c1", reason="exited", exit_code=0),
            line("sandbox.creating", sandbox="s2"),
            line("sandbox.creating", sandbox="s3"),
            line("sandbox.ending", sandbox="s3", why="killed", by="uid:1", detail=None),
            line("sandbox.ended", sandbox="s3", reason="killed"),
        ]
    )
    second = PastCommand("c2", 8, Cause(Why.TIMEOUT), stdin_closed=True)
    assert replay.boot_id == "b"
    assert replay.living == {"s1": PastSandbox("s1", True, None, 77, {"c2": second}), "s2": PastSandbox("s2")}
    assert replay.ended == {"s3": {"reason": "killed"}}
    assert replay.ended_commands == {"c1": ("s1", {"reason": "exited", "exit_code": 0})}


@pytest.mark.req("LIF-6")
def test_what_is_carried_into_a_new_file_replays_the_same() -> None:
    past = PastSandbox("s1", True, Cause(Why.TTL), 5, {"c2": PastCommand("c2", 8, Cause(Why.KILLED, "uid:1"), True)})
    fields = json.loads(json.dumps(past.carried("uid:1", "t")))
    assert Replay([line("carried", **fields["detail"])]).living == {"s1": past}


# --- a daemon in a process of its own -----------------------------------------------------------


class Daemon:
    """Started, killed and started again over one state directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.holder = Holder(root / "holder.sock")
        self.process: subprocess.Popen[bytes] | None = None
        images = root / "images"
        images.mkdir()
        (images / "python.erofs").touch()
        config = {"User": "0:0", "Env": [f"PATH={os.environ['PATH']}"], "WorkingDir": "/"}
        (images / "python.json").write_text(json.dumps({"config": config}))

    def start(self, point: str | None = None) -> None:
        names = [self.root / name for name in ("state", "images", "holder.sock", "api.sock")]
        argv = [sys.executable, "-m", "tests.unit.node.native_daemon", *map(str, names), *([point] if point else [])]
        with open(self.root / "daemon.log", "ab") as log:
            self.process = subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def wait_dead(self, timeout_s: float) -> bool:
        assert self.process is not None
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_up_or_dead(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                self._ask("GET", "/healthz", None, None, None)
            except (OSError, http.client.HTTPException):
                time.sleep(0.01)  # sleep: polls, with a deadline
            else:
                return

    def ask(self, method: str, path: str, body: Any = None, raw: bytes | None = None, key: str | None = None) -> Any:
        """One request, tried again until a daemon answers it."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return self._ask(method, path, body, raw, key)
            except (OSError, http.client.HTTPException):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)  # sleep: polls, with a deadline

    def _ask(self, method: str, path: str, body: Any, raw: bytes | None, key: str | None) -> Any:
        connection = http.client.HTTPConnection("localhost", timeout=60)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.connect(str(self.root / "api.sock"))
            headers = {"Idempotency-Key": key} if key else {}
            data = raw if raw is not None else json.dumps(body).encode() if body is not None else None
            if body is not None:
                headers["Content-Type"] = "application/json"
            connection.request(method, path, body=data, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status >= 400:
            raise Refused(json.loads(content))
        return json.loads(content) if "json" in answer.headers.get("content-type", "") else content


class Refused(Exception):
    def __init__(self, problem: dict[str, Any]) -> None:
        super().__init__(problem)
        self.problem = problem


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path)
    yield made
    if made.process is not None:
        made.kill()
    made.holder.close()
    verify(tmp_path / "state" / "journal")


LIMITS = {"disk_bytes": 1 << 24}
LINES = 12_000
WRITER = (
    f"LINES = {LINES}"
    """
import sys, time, hashlib
seed = sys.argv[1].encode()
for number in range(LINES):
    block = hashlib.sha256(seed + str(number).encode()).hexdigest() * 4
    (sys.stderr if number % 7 == 0 else sys.stdout).write(block + "\\n")
    if number % 100 == 0:
        sys.stdout.flush()
        time.sleep(0.05)
"""
)


def expected(seed: str) -> dict[int, str]:
    parts: dict[int, list[str]] = {1: [], 2: []}
    for number in range(LINES):
        parts[2 if number % 7 == 0 else 1].append(hashlib.sha256((seed + str(number)).encode()).hexdigest() * 4 + "\n")
    return {fd: hashlib.sha256("".join(texts).encode()).hexdigest() for fd, texts in parts.items()}


def feed_stdin(daemon: Daemon, path: str, data: bytes, failures: list[BaseException]) -> None:
    """A client that knows nothing of daemons: it sends from the confirmed offset until all is confirmed."""
    offset = 0
    try:
        while offset < len(data):
            piece = data[offset : offset + 40_000]
            last = offset + len(piece) == len(data)
            try:
                answer = daemon.ask("PUT", f"{path}/stdin?offset={offset}&eof={str(last).lower()}", raw=piece)
                offset = answer["offset"]
            except Refused as refused:
                if refused.problem["code"] not in ("stdin_offset", "stdin_closed"):
                    raise
                offset = refused.problem["context"]["offset"]
            time.sleep(0.03)  # sleep: spreads the writes over several daemons
    except BaseException as bad:  # a thread's failure is the test's
        failures.append(bad)


@native
@pytest.mark.req("LIF-6")
@pytest.mark.timeout(180)
def test_killed_again_and_again_nothing_is_lost_or_repeated(daemon: Daemon, seed: int, long_run: bool) -> None:
    chance = random.Random(seed)
    daemon.start()
    data, failures = chance.randbytes(2_000_000), list[BaseException]()
    paths, threads = list[list[str]](), list[threading.Thread]()
    for number in range(2):
        made = daemon.ask("POST", "/v1/sandboxes", {"limits": LIMITS}, key=f"box-{number}")["id"]
        writer = {"argv": [PYTHON, "-c", WRITER, f"seed-{number}"]}
        reader = {"argv": ["sha256sum"], "stdin": True}
        base = f"/v1/sandboxes/{made}/commands"
        ids = [daemon.ask("POST", base, each, key=str(each["argv"][0]))["id"] for each in (writer, reader)]
        paths.append([f"{base}/{command}" for command in ids])
        threads.append(threading.Thread(target=feed_stdin, args=(daemon, paths[-1][1], data, failures)))
    for thread in threads:
        thread.start()
    points = [
        "node.log.after_write:3",
        "node.adopt.before_reset:1",
        "node.adopt.during_reset:1",
        "node.command.before_confirm:1",
        None,
    ]
    kills = 40 if long_run else 5
    for number in range(kills):
        point = points[number % len(points)]
        daemon.kill()
        (daemon.root / "api.sock").unlink(missing_ok=True)
        daemon.start(point)
        daemon.wait_up_or_dead()
        died = daemon.wait_dead(chance.uniform(0.0, 0.6) if point is None else 1.0)
        assert died or point is None or not point.startswith("node.adopt."), f"{point} was never reached"
    daemon.kill()
    daemon.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    for number, (writer_path, reader_path) in enumerate(paths):
        for path in (writer_path, reader_path):
            ended = daemon.ask("GET", f"{path}?wait_s=30")
            assert ended["ended"]["reason"] == "exited", (ended, (daemon.root / "daemon.log").read_text()[-3000:])
        for fd, digest in expected(f"seed-{number}").items():
            assert hashlib.sha256(daemon.ask("GET", f"{writer_path}/output?fd={fd}")).hexdigest() == digest
        assert daemon.ask("GET", f"{reader_path}/output").split()[0].decode() == hashlib.sha256(data).hexdigest()
    assert daemon.ask("GET", "/v1/node")["generation"] == kills + 2


@native
@pytest.mark.req("LIF-6")
def test_killed_between_journal_and_open_the_command_still_runs_once(daemon: Daemon, tmp_path: Path) -> None:
    daemon.start()
    made = daemon.ask("POST", "/v1/sandboxes", {"limits": LIMITS}, key="box")["id"]
    daemon.kill()
    daemon.start("node.command.before_open:1")
    once = tmp_path / "once"
    request = {"argv": ["sh", "-c", f"echo x >> {once}; cat {once}"]}
    path = f"/v1/sandboxes/{made}/commands"
    thread = threading.Thread(target=lambda: daemon.ask("POST", path, request, key="once"))
    thread.start()
    assert daemon.wait_dead(60)
    daemon.start()
    thread.join(30)
    command = daemon.ask("POST", path, request, key="once")["id"]
    ended = daemon.ask("GET", f"{path}/{command}?wait_s=60")
    assert ended["ended"]["exit_code"] == 0
    assert once.read_text() == "x\n"
    assert [each["id"] for each in daemon.ask("GET", path)["commands"]] == [command]


@native
@pytest.mark.req("LIF-6")
@pytest.mark.parametrize("point", ["node.command.before_confirm:1", "node.log.after_write:1"])
def test_killed_at_the_end_of_a_command_its_end_and_output_are_there_once(
    daemon: Daemon, tmp_path: Path, point: str
) -> None:
    daemon.start()
    made = daemon.ask("POST", "/v1/sandboxes", {"limits": LIMITS}, key="box")["id"]
    daemon.kill()
    daemon.start(point)
    once = tmp_path / "once"
    path, request = f"/v1/sandboxes/{made}/commands", {"argv": ["sh", "-c", f"echo x >> {once}; cat {once}; exit 3"]}
    thread = threading.Thread(target=lambda: daemon.ask("POST", path, request, key="once"))
    thread.start()
    assert daemon.wait_dead(60), "the point was never reached"
    daemon.start()
    thread.join(30)
    command = daemon.ask("POST", path, request, key="once")["id"]
    ended = daemon.ask("GET", f"{path}/{command}?wait_s=60")
    assert (ended["ended"]["reason"], ended["ended"]["exit_code"]) == ("exited", 3)
    assert daemon.ask("GET", f"{path}/{command}/output") == b"x\n"
    assert once.read_text() == "x\n"


@native
@pytest.mark.req("LIF-6")
@pytest.mark.parametrize("point", ["after_journal", "after_boot", "after_start", "after_hello", "after_bind"])
def test_killed_during_create_leaves_nothing(daemon: Daemon, point: str) -> None:
    daemon.start(f"node.create.{point}:1")
    threading.Thread(
        target=lambda: daemon.ask("POST", "/v1/sandboxes", {"limits": LIMITS, "ttl_s": 99}, key="later"), daemon=True
    ).start()
    assert daemon.wait_dead(60)
    held = {pid for pid, _ in daemon.holder.held.values()}
    daemon.start()
    made = daemon.ask("POST", "/v1/sandboxes", {"limits": LIMITS, "ttl_s": 99}, key="later")["id"]
    assert [each["id"] for each in daemon.ask("GET", "/v1/sandboxes?all=true")["sandboxes"]] == [made]
    assert list(daemon.holder.held) == [made]
    assert os.listdir(daemon.root / "state" / "sandboxes") == [made]
    for pid in held:
        assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]


@native
@pytest.mark.req("EXE-5")
def test_what_died_with_the_daemon_has_a_typed_end(daemon: Daemon) -> None:
    daemon.start()
    made = daemon.ask("POST", "/v1/sandboxes", {"limits": LIMITS}, key="box")["id"]
    command = daemon.ask("POST", f"/v1/sandboxes/{made}/commands", {"argv": ["sleep", "100"]}, key="c")["id"]
    pid = daemon.holder.held[made][0]
    daemon.kill()
    os.kill(pid, signal.SIGKILL)
    daemon.start()
    ended = daemon.ask("GET", f"/v1/sandboxes/{made}?wait_s=60")
    assert (ended["state"], ended["ended"]["reason"]) == ("ended", "host_failure")
    assert daemon.ask("GET", f"/v1/sandboxes/{made}/commands/{command}")["ended"]["reason"] == "host_failure"
    daemon.kill()
    daemon.start()
    assert daemon.ask("GET", f"/v1/sandboxes/{made}")["ended"]["reason"] == "host_failure"


@native
@pytest.mark.req("LIF-6")
def test_a_daemon_that_stops_leaves_its_sandboxes(daemon: Daemon) -> None:
    daemon.start()
    made = daemon.ask("POST", "/v1/sandboxes", {"limits": LIMITS}, key="box")["id"]
    assert daemon.process is not None
    daemon.process.terminate()
    assert daemon.wait_dead(60)
    daemon.start()
    assert daemon.ask("GET", f"/v1/sandboxes/{made}")["state"] == "running"
    run = daemon.ask("POST", f"/v1/sandboxes/{made}/commands", {"argv": ["echo", "hi"]}, key="c")["id"]
    path = f"/v1/sandboxes/{made}/commands/{run}"
    assert daemon.ask("GET", f"{path}?wait_s=60")["ended"]["exit_code"] == 0
    assert daemon.ask("GET", f"{path}/output") == b"hi\n"


@native
@pytest.mark.req("LIF-6")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_ended_while_it_adopts_the_next_one_adopts_again(daemon: Daemon, how: signal.Signals) -> None:
    daemon.start()
    made = daemon.ask("POST", "/v1/sandboxes", {"limits": LIMITS}, key="box")["id"]
    path = f"/v1/sandboxes/{made}/commands"
    waits = "read word; cat > /dev/null; exit $word"  # it ends only when it has read the end of file too
    command = daemon.ask("POST", path, {"argv": ["sh", "-c", waits], "stdin": True}, key="c")["id"]
    parent = daemon.holder.held[made][0]
    agent = int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])
    os.kill(agent, signal.SIGSTOP)
    for _ in range(3):
        assert daemon.process is not None
        daemon.process.send_signal(how)
        assert daemon.wait_dead(20)
        (daemon.root / "api.sock").unlink(missing_ok=True)
        daemon.start()
        assert daemon.ask("GET", f"/v1/sandboxes/{made}")["state"] == "running"
        assert daemon.ask("GET", f"{path}/{command}")["ended"] is None
    os.kill(agent, signal.SIGCONT)
    daemon.ask("PUT", f"{path}/{command}/stdin?offset=0&eof=true", raw=b"7\n")
    assert daemon.ask("GET", f"{path}/{command}?wait_s=60")["ended"]["exit_code"] == 7
    assert daemon.holder.held[made][0] == parent


@native
@pytest.mark.req("EXE-5")
def test_a_kill_that_was_journalled_is_carried_out(daemon: Daemon) -> None:
    """The daemon dies between the cause and the kill: the next one kills, and the cause is the first one's."""
    daemon.start()
    made = daemon.ask("POST", "/v1/sandboxes", {"limits": LIMITS, "ttl_s": 1.0}, key="box")["id"]
    daemon.kill()
    time.sleep(1.1)  # sleep: its time passes while no daemon is there
    daemon.start()
    ended = daemon.ask("GET", f"/v1/sandboxes/{made}?wait_s=60")["ended"]
    assert (ended["reason"], ended["by"]) == ("timed_out", "ttl")
