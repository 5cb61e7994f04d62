"""The walls around a sandbox, read from the host's /proc while two of them run. Nothing here is assumed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.keeper import harness
from tests.unit.keeper.harness import Guest, Node, spec

NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts")
CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")

SENTRY_DESCRIPTORS = {
    r"/null": 4,
    r"/": 1,
    r"/.*/f/runsc-filestore-\d+ \(deleted\)": 1,
    r"/memfd:(memory-usage|systrap-memory|runsc-memory) \(deleted\)": 3,
    r"anon_inode:\[eventpoll\]": 2,
    r"anon_inode:\[eventfd\]": 6,
    r"anon_inode:seccomp notify": 64,  # one for each address space of the guest
    r"pipe:\[\d+\]": 6,
    r"socket:\[\d+\]": 6,
}
"""What a sentry may hold, and at most how many. `/` is the image's descriptor: it is bound at a path of its own."""


@dataclass
class Box:
    id: str
    pid: int
    host_uid: int
    guest: Guest


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with harness.node() as made:
        yield made


@pytest.fixture(scope="module")
def boxes(node: Node) -> list[Box]:
    made = []
    for _ in range(2):
        wanted = spec()
        booted = node.boot(wanted)
        node.ask("start", sandbox=wanted.id)
        guest = Guest(node, wanted.id)
        guest.hello()
        node.ask("seal", sandbox=wanted.id)
        guest.bind()
        assert guest.run("/bin/true")[0]["ok"]["code"] == 0
        made.append(Box(wanted.id, booted["pid"], booted["host_uid"], guest))
    return made


def status(pid: int | str) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


def family(box: Box) -> list[int]:
    """The sentry and all its descendants (the stub processes in which guest code runs)."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(status(name)["PPid"][0])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {box.pid}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def namespace(pid: int | str, kind: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")


@pytest.mark.req("ISO-4")
def test_each_has_a_uid_of_its_own(node: Node, boxes: list[Box]) -> None:
    uids = []
    for box in boxes:
        for pid in family(box):
            of_one = {int(number) for name in ("Uid", "Gid") for number in status(pid)[name]}
            assert of_one == {box.host_uid}, "every id of every process of it"
            assert status(pid)["Groups"] == []
        uids.append(box.host_uid)
    node_uid = int(status(node.pid)["Uid"][0])
    assert len({*uids, 0, node_uid, os.getuid()}) >= len(uids) + (1 if node_uid == 0 or os.getuid() == node_uid else 2)
    assert 0 not in uids
    assert node_uid not in uids


@pytest.mark.req("ISO-4")
def test_no_process_has_a_capability(boxes: list[Box]) -> None:
    for box in boxes:
        members = family(box)
        assert len(members) > 1, "no stub process: nothing ran"
        for pid in members:
            of_one = status(pid)
            assert {int(of_one[name][0], 16) for name in CAPABILITY_SETS} == {0}
            assert of_one["NoNewPrivs"] == ["1"]
            assert of_one["Seccomp"] == ["2"]


@pytest.mark.req("ISO-4")
def test_each_has_namespaces_of_its_own(node: Node, boxes: list[Box]) -> None:
    for kind in NAMESPACES:
        found = {namespace(box.pid, kind) for box in boxes}
        others = {namespace(pid, kind) for pid in ("self", node.pid, node.keeper_pid())}
        assert len(found) == 2, kind
        assert not found & others, kind


@pytest.mark.req("ISO-4")
def test_its_root_is_an_empty_read_only_tmpfs(boxes: list[Box]) -> None:
    for box in boxes:
        (mount,) = Path(f"/proc/{box.pid}/mountinfo").read_text().splitlines()
        assert re.search(r" / / ro\S* .*- tmpfs runsc-root ", mount)


@pytest.mark.req("ISO-4")
def test_no_gofer_is_left(node: Node, boxes: list[Box]) -> None:
    assert all(row["sealed"] for row in node.ask("everything"))
    for box in boxes:
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    argv = Path(f"/proc/{name}/cmdline").read_bytes()
                except OSError:
                    continue
                assert not (b"gofer" in argv.split(b"\0")[0] and box.id.encode() in argv)


@pytest.mark.req("ISO-6")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can list another user's descriptors")
def test_the_sentry_holds_the_expected_descriptors_and_no_more(boxes: list[Box]) -> None:
    for box in boxes:
        count = dict.fromkeys(SENTRY_DESCRIPTORS, 0)
        for name in os.listdir(f"/proc/{box.pid}/fd"):
            target = os.readlink(f"/proc/{box.pid}/fd/{name}")
            matching = [pattern for pattern in count if re.fullmatch(pattern, target)]
            assert matching, f"descriptor {name} is {target}"
            count[matching[0]] += 1
        too_many = {pattern: n for pattern, n in count.items() if n > SENTRY_DESCRIPTORS[pattern]}
        assert not too_many
        image = next(fd for fd in os.listdir(f"/proc/{box.pid}/fd") if os.readlink(f"/proc/{box.pid}/fd/{fd}") == "/")
        flags = Path(f"/proc/{box.pid}/fdinfo/{image}").read_text()
        assert int(re.search(r"flags:\s+(\d+)", flags)[1], 8) & os.O_ACCMODE == os.O_RDONLY  # type: ignore[index]


@pytest.mark.req("ISO-4")
@pytest.mark.req("RES-1")
def test_limits_are_set_from_outside(boxes: list[Box]) -> None:
    for box in boxes:
        text = Path(f"/proc/{box.pid}/cgroup").read_text()
        assert box.id in text
        limits = Path(f"/proc/{box.pid}/limits").read_text()
        assert re.search(r"Max file size\s+2147483648\s", limits)
        assert re.search(r"Max core file size\s+0\s+0\s", limits)


@pytest.mark.req("ISO-7")
def test_daemon_and_keeper_have_no_capability_outside(node: Node, boxes: list[Box]) -> None:
    daemon, keeper = status(node.pid), status(node.keeper_pid())
    assert {int(daemon[name][0], 16) for name in ("CapPrm", "CapEff", "CapAmb")} == {0}
    if node.mode == "machine":
        assert int(daemon["CapBnd"][0], 16) == 0
        assert daemon["NoNewPrivs"] == keeper["NoNewPrivs"] == ["1"]
        assert int(daemon["Uid"][0]) != 0
    assert daemon["Uid"] == keeper["Uid"], "both are one ordinary user"
    assert namespace(node.pid, "user") == namespace("self", "user")
    assert namespace(node.keeper_pid(), "user") != namespace("self", "user"), "its capabilities count only in there"
    own = int(keeper["Uid"][0])
    first, *rest = [line.split() for line in Path(f"/proc/{node.keeper_pid()}/uid_map").read_text().splitlines()]
    assert first == ["0", str(own), "1"]
    (ids,) = rest
    assert int(ids[1]) > 65535
    assert all(int(ids[1]) <= box.host_uid < int(ids[1]) + int(ids[2]) for box in boxes)


@pytest.mark.req("ISO-7")
def test_the_keepers_directory_is_out_of_the_daemons_reach(node: Node, boxes: list[Box]) -> None:
    found = os.stat(node.paths.keeper_dir)
    assert found.st_uid not in (0, int(status(node.pid)["Uid"][0]))
    assert found.st_mode & 0o777 == 0o700


@pytest.mark.req("ISO-4")
def test_two_maps_of_two_ids(boxes: list[Box]) -> None:
    for box in boxes:
        (line,) = Path(f"/proc/{box.pid}/uid_map").read_text().splitlines()
        assert line.split() == ["65534", str(box.host_uid), "1"]


@pytest.mark.req("ISO-8")
def test_inside_a_command_has_no_capability_and_cannot_reach_the_agent(boxes: list[Box]) -> None:
    script = """
import ctypes, json, os, signal
def tried(call):
    try: call(); return "done"
    except OSError as e: return e.strerror
lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
libc = ctypes.CDLL(None, use_errno=True)
attached = libc.ptrace(16, 1, 0, 0)
print(json.dumps({
    "caps": [lines[n].strip() for n in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "uid": os.getuid(),
    "kill": tried(lambda: os.kill(1, signal.SIGKILL)),
    "stop": tried(lambda: os.kill(1, signal.SIGSTOP)),
    "mem": tried(lambda: open("/proc/1/mem", "rb").read(1)),
    "environ": tried(lambda: open("/proc/1/environ", "rb").read(1)),
    "attached": attached,
    "memory_kb": int(open("/proc/meminfo").readline().split()[1]),
}))
"""
    for box in boxes:
        for user in ("1000:1000", "0:0"):
            end, output = box.guest.run("/usr/bin/python3", "-c", script, user=user)
            assert end["ok"]["code"] == 0, output
            found = json.loads(output)
            assert {int(one, 16) for one in found["caps"]} == {0}
            assert found["uid"] == int(user.split(":")[0])
            assert found["attached"] == -1
            for deed in ("kill", "stop", "mem", "environ"):
                assert found[deed] in ("Operation not permitted", "Permission denied"), (user, deed)
            assert found["memory_kb"] == 256 * 1024, "it sees its own limit"
