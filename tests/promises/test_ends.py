"""Every end, seen three ways: the SDK's result, the command line's exit code, the API's JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cloche.client import Command, Node, Sandbox
from cloche.wire.ends import End
from cloche_server.channel.frames import Kind, encode
from tests.promises.evil import EvilImages, raw, spec
from tests.promises.nodes import CLI, RealNode, wait_until
from tests.promises.plants import PlantedNode, guest_processes, planted_node, sentry_pid
from tests.promises.raw_api import ask

HURRY = {
    "cloche_server.node.liveness:SILENCE_S": 0.5,
    "cloche_server.node.liveness:PONG_S": 5.0,
    "cloche_server.node.command:ABORT_S": 6.0,
}
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def node(evil_image: EvilImages) -> Iterator[PlantedNode]:
    """With images whose agent is evil, and a daemon that soon asks a silent guest whether it lives."""
    with planted_node(images=evil_image.directory, constants=HURRY) as made:
        yield made


@pytest.fixture(scope="module")
def box(node: PlantedNode) -> Iterator[Sandbox]:
    with node.sandbox() as made:
        yield made


def shown(end: End | dict[str, Any] | None) -> dict[str, Any]:
    """An end without its time and its words, which are for people."""
    assert end is not None
    plain = end if isinstance(end, dict) else end.model_dump(mode="json")
    return {name: value for name, value in plain.items() if value is not None and name not in ("at", "detail")}


def owner() -> str:
    return f"uid:{os.getuid()}"


# --------------------------------------------------------------------------------------- a command's


@dataclass(frozen=True)
class Row:
    """A command, how it must end, and the exit code of `cloche exec`."""

    name: str
    argv: list[str]
    end: dict[str, Any]
    code: int
    fields: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


COMMAND_ENDS = [
    Row("exited", ["sh", "-c", "exit 3"], {"reason": "exited", "exit_code": 3}, 3),
    Row("succeeded", ["true"], {"reason": "exited", "exit_code": 0}, 0),
    Row("segfault", ["sh", "-c", "kill -SEGV $$"], {"reason": "signalled", "signal": 11}, 139),
    Row("signal-9", ["sh", "-c", "kill -KILL $$"], {"reason": "signalled", "signal": 9}, 137),
    Row(
        "time-out",
        ["sh", "-c", "trap '' TERM INT; sleep 100"],
        {"reason": "timed_out", "signal": 9, "by": "timeout"},
        124,
        {"timeout_s": 1.0},
        ("--timeout", "1s"),
    ),
    Row(
        "output-limit",
        ["head", "-c", str(65 * MIB), "/dev/zero"],
        {"reason": "output_limit", "signal": 9},
        153,
        {"output_bytes_max": MIB},
    ),
    Row("no-program", ["/no/such"], {"reason": "not_started", "error_code": "command_not_found"}, 127),
    Row("no-program-in-path", ["no-such"], {"reason": "not_started", "error_code": "command_not_found"}, 127),
    Row("not-executable", ["/etc/passwd"], {"reason": "not_started", "error_code": "not_executable"}, 126),
    Row(
        "no-user",
        ["true"],
        {"reason": "not_started", "error_code": "no_such_user"},
        126,
        {"user": "ghost"},
        ("--user", "ghost"),
    ),
]


@pytest.mark.req("EXE-5")
@pytest.mark.parametrize("row", COMMAND_ENDS, ids=lambda row: row.name)
def test_a_commands_end_is_the_same_three_ways(node: PlantedNode, box: Sandbox, row: Row) -> None:
    command = box.commands.start(row.argv, **row.fields)
    result = command.result()
    assert shown(result.end) == row.end
    assert (str(result.ended), result.ok) == (row.end["reason"], row.end.get("exit_code") == 0)
    status, said = ask(node, "GET", f"/v1/sandboxes/{box.id}/commands/{command.id}")
    assert (status, said["state"], shown(said["ended"])) == (200, "ended", row.end)
    done = node.cloche("exec", *row.flags, box.id, "--", *row.argv)
    assert done.returncode == row.code, done.stderr[-300:]
    if row.end["reason"] not in ("exited", "signalled"):
        assert (row.end.get("error_code") or row.end["reason"]).encode() in done.stderr
    assert box.info().ended is None, "the sandbox must live on"


@pytest.mark.req("EXE-5")
def test_a_killed_command_says_by_whom(node: PlantedNode, box: Sandbox) -> None:
    with cloche(node, "exec", box.id, "--", "sleep", "1000") as typed:
        mine = box.commands.start(["sleep", "1000"])
        wait_until(lambda: len(running(box)) == 2, what="both to run")
        for command in running(box):
            command.kill()
        end = {"reason": "killed", "signal": 9, "by": owner()}
        assert shown(mine.result().end) == end
        assert shown(ask(node, "GET", f"/v1/commands/{mine.id}")[1]["ended"]) == end
        assert typed.wait(30) == 137
    assert box.info().ended is None


def running(box: Sandbox) -> list[Command]:
    return [command for command in box.commands.list() if command.view.state == "running"]


@contextmanager
def cloche(node: RealNode, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command line, typed and left running."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        [str(CLI), *words], env=node.environment, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE
    ) as typed:
        try:
            yield typed
        finally:
            typed.kill()


# -------------------------------------------------------------------------------------- a sandbox's

EAT = "x = []\nwhile True: x.append(b'x' * 1048576)"
Act = Callable[[PlantedNode, str], None]


def nothing(node: PlantedNode, sandbox: str) -> None:
    """The end comes by itself."""


def kill_sandbox(node: PlantedNode, sandbox: str) -> None:
    with node.client() as client:
        Sandbox.connect(sandbox, node=client).kill()


def kill_sentry(node: PlantedNode, sandbox: str) -> None:
    os.kill(sentry_pid(node, sandbox), signal.SIGKILL)


@dataclass(frozen=True)
class SandboxRow:
    """A sandbox with a command in it, what is done to it, and how both must end."""

    name: str
    end: dict[str, Any]
    code: int
    argv: tuple[str, ...] = ("sleep", "1000")
    act: Act = nothing
    command_end: dict[str, Any] | None = None
    """None: as the sandbox's."""
    fields: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    is_evil: bool = False


def evil(name: str, reason: str, *argv: str) -> SandboxRow:
    return SandboxRow(f"{reason}-{name}", {"reason": reason}, 125, argv=argv, is_evil=True)


def spoilt(frame: bytes) -> bytes:
    """With a wrong checksum."""
    return frame[:-1] + bytes((frame[-1] ^ 1,))


SANDBOX_ENDS = [
    SandboxRow("ttl", {"reason": "timed_out", "by": "ttl"}, 124, fields={"ttl_s": 2.0}, flags=("--ttl", "2s")),
    SandboxRow(
        "killed",
        {"reason": "killed", "by": owner()},
        137,
        act=kill_sandbox,
        command_end={"reason": "killed", "by": "sandbox"},
    ),
    SandboxRow(
        "out-of-memory",
        {"reason": "out_of_memory"},
        137,
        argv=("python3", "-c", EAT),
        fields={"memory_mb": 96},
        flags=("--memory", "96m"),
    ),
    SandboxRow("sentry-killed", {"reason": "host_failure"}, 125, act=kill_sentry),
    evil("leave", "host_failure", "exit"),
    evil("hang-up", "host_failure", "hang-up"),
    evil("freeze", "unresponsive", "stuck"),
    evil("bad-crc", "protocol_error", "frames", raw(spoilt(encode(Kind.DATA, 4, b"x")))),
    evil("bad-kind", "protocol_error", "frames", spec(77, "s", b"x")),
    evil("bad-json", "protocol_error", "frames", spec(Kind.END, "s", b"\x1b]0;title\x07")),
    evil("too-much", "protocol_error", "frames", f"{int(Kind.DATA)}:s:z70000"),
]


@pytest.mark.req("EXE-5")
@pytest.mark.parametrize("row", SANDBOX_ENDS, ids=lambda row: row.name)
def test_a_sandboxs_end_is_the_same_three_ways(node: PlantedNode, row: SandboxRow, evil_image: EvilImages) -> None:
    image = evil_image("serve") if row.is_evil else "python"
    name = f"typed-{row.name.replace('_', '-')}"
    with (
        node.client() as client,
        cloche(node, "run", "--name", name, *row.flags, image, "--", *row.argv) as typed,
        Sandbox.create(image, node=client, **row.fields) as box,
    ):
        command = box.commands.start(list(row.argv))
        wait_until(lambda: typed.poll() is not None or is_running(client, name), 60, f"{name} to run")
        for each in client.list():
            if each.id == box.id or each.view.name == name:
                row.act(node, each.id)
        assert shown(box.wait(60).ended) == row.end
        ended = row.end if row.command_end is None else row.command_end
        assert shown(command.result().end) == ended
        assert shown(ask(node, "GET", f"/v1/sandboxes/{box.id}")[1]["ended"]) == row.end
        assert shown(ask(node, "GET", f"/v1/sandboxes/{box.id}/commands/{command.id}")[1]["ended"]) == ended
        assert ask(node, "POST", f"/v1/sandboxes/{box.id}/commands", body={"argv": ["true"]})[0] == 410
        said = typed.communicate(timeout=60)[1].decode()
        assert typed.returncode == row.code, said
        assert row.end["reason"] in said
        assert "\x1b" not in said
        listed = json.loads(node.cloche("ps", "--all", "--json").stdout)["sandboxes"]
        assert shown(next(entry for entry in listed if entry["id"] == box.id)["ended"]) == row.end


def is_running(client: Node, name: str) -> bool:
    return any((each.view.name, each.view.state) == (name, "running") for each in client.list())


@pytest.mark.req("EXE-5")
def test_an_idle_sandbox_times_out(node: PlantedNode) -> None:
    with node.sandbox(idle_timeout_s=1.5) as box:
        assert box.run(["sleep", "2"]).ok, "a running command is not idleness"
        end = {"reason": "timed_out", "by": "idle"}
        assert shown(box.wait(20).ended) == end
        assert shown(ask(node, "GET", f"/v1/sandboxes/{box.id}")[1]["ended"]) == end
        done = node.cloche("exec", box.id, "--", "true")
        assert (done.returncode, b"sandbox_ended" in done.stderr) == (125, True)


@pytest.mark.req("EXE-5")
@pytest.mark.req("LIF-6")
def test_an_end_without_a_daemon_is_told_by_the_next(own_node: RealNode) -> None:
    with own_node.sandbox(memory_mb=96) as killed, own_node.sandbox(memory_mb=96) as greedy:
        sentries = [sentry_pid(own_node, box.id) for box in (killed, greedy)]
        asleep = killed.commands.start(["sleep", "1000"])
        eating = greedy.commands.start(["sh", "-c", 'sleep 2; exec python3 -c "$1"', "sh", EAT])
        wait_until(lambda: eating.info().state == "running", what="both to run")
        own_node.kill_daemon()
        os.kill(sentries[0], signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, sentries)), 60, "their sentries to be gone")
        own_node.start()
        for box, command, reason in ((killed, asleep, "host_failure"), (greedy, eating, "out_of_memory")):
            assert shown(box.wait(20).ended) == {"reason": reason}
            assert shown(command.result().end) == {"reason": reason}
    wait_until(lambda: not guest_processes(own_node), what="their processes to be gone")


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


# ------------------------------------------------------------- limits that the guest has no part in


def processes_of(node: RealNode, box: Sandbox) -> list[int]:
    """Its sentry and every process below it: they have a host's uid of their own."""
    isolation = box.info().isolation
    assert isolation is not None
    return [pid for pid in guest_processes(node) if owner_of(pid) == isolation.host_uid]


def owner_of(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError:
        return -1


def freeze(node: RealNode, box: Sandbox) -> None:
    """Nothing of the guest runs any more."""
    for pid in processes_of(node, box):
        os.kill(pid, signal.SIGSTOP)


@pytest.mark.req("RES-2")
def test_a_frozen_guest_lives_no_longer_than_its_ttl(node: PlantedNode) -> None:
    with node.sandbox(ttl_s=3) as box:
        command = box.commands.start(["sleep", "1000"])
        freeze(node, box)
        assert shown(box.wait(10).ended) == {"reason": "timed_out", "by": "ttl"}
        assert shown(command.result().end) == {"reason": "timed_out", "by": "ttl"}
        lived_s = ask(node, "GET", f"/v1/sandboxes/{box.id}")[1]["age_s"]
        assert 2.9 < lived_s < 6
        assert processes_of(node, box) == []
    print(f"\nfrozen, with a time to live of 3 s: ended after {lived_s:.2f} s")


@pytest.mark.req("RES-2")
def test_a_frozen_guest_is_killed_at_once(node: PlantedNode) -> None:
    with node.sandbox() as box:
        freeze(node, box)
        assert shown(box.kill().ended) == {"reason": "killed", "by": owner()}
        assert processes_of(node, box) == []


@pytest.mark.req("RES-2")
def test_a_command_ends_at_its_time_limit_even_if_the_agent_is_deaf(node: PlantedNode, evil_image: EvilImages) -> None:
    """This one answers every PING, so it never counts as silent, and does nothing that it is told."""
    with node.sandbox(image=evil_image("serve")) as box:
        command = box.commands.start(["stubborn"], timeout_s=1.0)
        assert shown(command.wait(30)) == {"reason": "timed_out", "by": "timeout"}
        assert shown(box.wait(20).ended) == {"reason": "unresponsive"}
        done = node.cloche("run", "--timeout", "1s", evil_image("serve"), "--", "stubborn")
        assert done.returncode == 124, done.stderr


@pytest.mark.req("RES-2")
def test_a_command_in_a_frozen_guest_ends_at_its_time_limit(node: PlantedNode) -> None:
    with node.sandbox() as box:
        command = box.commands.start(["sleep", "1000"], timeout_s=1.0)
        freeze(node, box)
        assert shown(command.wait(30)) == {"reason": "timed_out", "by": "timeout"}
        assert shown(box.wait(20).ended) == {"reason": "unresponsive"}
