"""From nothing to a sandboxed command, on a clean Debian with nothing but a directory of wheels and one file.

Every line is typed at a terminal; the fixes that are printed are typed as they stand. What was seen is kept in
build/transcripts/clean_machine.txt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from cloche.wire.ids import short
from tests.promises.chroots import FIRST_SUBID, IS_CGROUP_V2, SUBIDS
from tests.promises.clean_machines import CALL, ROOTFS, WHEELS, CleanMachine

RUN = f"cloche run -- {CALL}"
ALICE = 1000
TOOLS = "cc gcc clang go cargo rustc make git uv runsc docker"

pytestmark = pytest.mark.timeout(240)


def fix_of(text: str) -> str:
    """The command in the advice below an error."""
    found = re.search(r"(sudo .+)$", text.strip().splitlines()[-1])
    assert found, text
    return found[1]


def host_uids(machine: CleanMachine) -> set[int]:
    return {uid for uid, _line in machine.processes()}


@pytest.mark.req("UX-1")
def test_the_machine_is_clean_and_the_wheels_suffice(clean_machine: CleanMachine) -> None:
    assert clean_machine.empty_home, "an empty home that nobody else can enter"
    assert clean_machine.does(f"for tool in {TOOLS}; do command -v $tool; done; true") == ""
    assert clean_machine.does("ls /sys/class/net") == "lo\n", "no network: pip had the directory and nothing else"
    assert clean_machine.installed.code == 0, clean_machine.installed.text
    assert clean_machine.installed.text == "", "--quiet, and nothing to warn about"


@pytest.mark.req("UX-1")
@pytest.mark.req("FLT-1")
@pytest.mark.skipif(IS_CGROUP_V2, reason="version 2 is delegated by systemd, which this chroot has not")
def test_a_user_without_root_runs_a_command(clean_machine: CleanMachine) -> None:
    alice, before = clean_machine.alice, clean_machine.left()
    alice("cloche doctor")
    before |= clean_machine.left()  # the engine's link inside the installation

    code, text = alice(f"CLOCHE_ROOTFS=/nowhere {RUN}", rootfs=False)
    assert (code, text.startswith("✗ image_not_found: ")) == (125, True), text
    assert "CLOCHE_ROOTFS" in text

    code, text = alice(RUN)
    assert (code, text.startswith("✗ no_cgroup_delegation: ")) == (125, True), text
    assert clean_machine.left() == before, "a refused start leaves nothing"
    fix = fix_of(text)
    assert "delegate alice" in fix
    code, text = alice("cloche doctor")
    assert code == 1
    assert fix in text, "doctor and run name the same command"
    code, text = alice(fix)
    assert code == 0, text
    assert text.startswith("✓ alice can run a node with limits now")

    code, text = alice(RUN)
    assert (code, text.splitlines()[1:]) == (0, ["42"])
    assert re.match(r"✓ node started for you \(gVisor release-\d{8}\.\d+; limits by cgroup v1\)$", text.splitlines()[0])
    assert alice(RUN) == (0, "42\n"), "a later run prints nothing of its own"
    piped = clean_machine.piped("alice", f"env/bin/{RUN}")
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, "42\n", "")

    code, text = alice("cloche create --name stays")
    assert code == 0, text
    uids = host_uids(clean_machine)
    assert uids - {ALICE}, "the sandbox has a uid of its own"
    assert all(uid == ALICE or FIRST_SUBID <= uid < FIRST_SUBID + SUBIDS for uid in uids), "nothing privileged runs"

    assert alice("cloche down", answer="n\n")[0] == 130
    code, text = alice("cloche down", answer="y\n")
    assert (code, text.endswith("✓ the node is stopped\n")) == (0, True), text
    assert clean_machine.processes() == []
    assert set(clean_machine.cgroups()) == {f"cloche-{ALICE}"}, "no sandbox's cgroup is left"

    code, text = alice("cloche reset --all", answer="y\n")
    assert (code, text.endswith("✓ removed /home/alice/.local/state/cloche\n")) == (0, True), text
    assert clean_machine.left() == before, "nothing but the wheels"
    code, text = alice(fix.replace("delegate", "delegate --remove"))
    assert (code, clean_machine.cgroups()) == (0, []), text
    assert alice(RUN)[1].startswith("✗ no_cgroup_delegation: "), "as it was before"


# ------------------------------------------------------------------ one node for the machine


@pytest.fixture
def machines_node(clean_machine: CleanMachine) -> Iterator[CleanMachine]:
    """`sudo cloche up`; bob and carol have the client alone, from the same directory of wheels."""
    for name in ("bob", "carol"):
        clean_machine.add_user(name)
    client = f"/opt/cloche/bin/pip install --quiet --no-index --find-links {WHEELS} cloche"
    clean_machine.does(f"python3 -m venv /opt/cloche && {client}", timeout_s=110)
    clean_machine.does("ln -s /opt/cloche/bin/cloche /usr/local/bin/cloche")
    try:
        yield clean_machine
    finally:
        clean_machine.does(". /home/alice/env/bin/activate; cloche reset --all --yes")
        clean_machine.does(
            "rm -rf /opt/cloche /usr/local/bin/cloche /tmp/refused.py; userdel -r bob 2>&1; userdel -r carol 2>&1; true"
        )


@pytest.mark.req("FLT-1")
@pytest.mark.req("ISO-3")
def test_two_users_of_one_machine_do_not_see_each_other(machines_node: CleanMachine) -> None:
    machine, sudo = machines_node, "sudo $(command -v cloche)"
    before = machine.left()
    machine.types("bob", RUN)
    place = "/var/lib/cloche/images"  # sudo keeps no CLOCHE_ROOTFS
    machine.alice(f"sudo mkdir -p {place} && sudo cp {ROOTFS} {place}")
    code, text = machine.alice(f"{sudo} up")
    assert (code, text.startswith("✓ node started for all users of this machine (gVisor ")) == (0, True), text
    assert machine.alice(f"{sudo} up")[1].startswith("✓ the node is already running ("), "twice is once"
    assert machine.does("stat -c '%a %U' /run/cloche/api.sock") == "666 cloche\n"

    boxes = {}
    for user in ("bob", "carol"):
        assert machine.types(user, RUN).text == "42\n"
        seen = machine.piped(user, f"cloche create --json --name mine -- sh -c 'echo secret of {user}; exec sleep 600'")
        assert seen.returncode == 0, seen.stderr
        boxes[user] = json.loads(seen.stdout)
    assert boxes["bob"]["isolation"]["host_uid"] != boxes["carol"]["isolation"]["host_uid"]
    for user in boxes:
        _sees_only_his_own(machine, user, boxes)
    everything = {box["id"] for box in json.loads(machine.piped("root", "cloche ps --json").stdout)["sandboxes"]}
    assert everything == {box["id"] for box in boxes.values()}, "root sees all"
    node_uid = int(machine.does("id -u cloche"))
    assert all(uid == node_uid or uid > 65535 for uid in host_uids(machine)), (
        "nothing privileged runs, nothing is alice's"
    )

    assert machine.types("carol", "cloche kill --all").text == "✓ ended 1 sandbox\n"
    assert machine.types("bob", "cloche ps --quiet").text.strip() == short(boxes["bob"]["id"]), "bob's goes on"
    assert machine.alice("cloche down") == (0, "✓ no node of your own is running\n")
    assert machine.types("bob", "cloche ps").code == 0, "only root stops the machine's node"

    code, text = machine.alice(f"{sudo} down", answer="y\n")
    assert (code, text.endswith("✓ the node is stopped\n")) == (0, True), text
    assert machine.processes() == []
    seen = machine.types("bob", RUN)
    assert (seen.code, seen.text.startswith("✗ ")) == (125, True), seen.text
    code, text = machine.alice(f"{sudo} reset --all", answer="y\n")
    assert code == 0, text
    assert (machine.cgroups(), machine.left() - before - {"/tmp/refused.py"}) == ([], set())
    assert "cloche:" not in machine.does("cat /etc/passwd /etc/group")


REFUSED = """
import sys
from cloche import Sandbox
from cloche.client import Node
from cloche.wire.errors import ClocheError
from cloche.wire.ids import short
other, command = sys.argv[1:]
node = Node()
mine = node.connect("mine")
def box(): return Sandbox(node, mine.view.model_copy(update={"id": other}))
tries = {
    "get": lambda: node.connect(other), "short": lambda: node.connect(short(other)),
    "run": lambda: box().run("true"), "kill": lambda: box().kill(), "extend": lambda: box().extend(60),
    "read": lambda: box().files.read("/etc/passwd"), "write": lambda: box().files.write("/tmp/x", b""),
    "command": lambda: box().commands.get(command),
}
for name, call in tries.items():
    try:
        call()
        print(name, "allowed")
    except ClocheError as refused:
        print(name, refused.code)
"""


def _sees_only_his_own(machine: CleanMachine, user: str, boxes: dict[str, dict[str, object]]) -> None:
    other = str(next(box["id"] for name, box in boxes.items() if name != user))
    command = next(box["first_command"] for name, box in boxes.items() if name != user)
    listed = json.loads(machine.piped(user, "cloche ps --all --json").stdout)["sandboxes"]
    assert {box["owner"] for box in listed} == {boxes[user]["owner"]}
    assert machine.piped(user, "cloche logs mine").stdout == f"secret of {user}\n", "the same name, each his own"
    (machine.tree / "tmp/refused.py").write_text(REFUSED)
    answers = machine.piped(user, f"/opt/cloche/bin/python /tmp/refused.py {other} {command}")
    assert {line.split()[1] for line in answers.stdout.splitlines()} == {"not_found"}, answers
    assert len(answers.stdout.splitlines()) == 8
    for one in (f"exec {other} -- true", f"logs {command}", f"kill {other}", f"cp {other}:/etc/passwd /tmp/stolen"):
        seen = machine.types(user, f"cloche {one}")
        assert (seen.code != 0, seen.text.startswith("✗ not_found: ")) == (True, True), f"{one}: {seen.text}"
