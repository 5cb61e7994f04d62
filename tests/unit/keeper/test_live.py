"""A real keeper, started by the real launcher: refusals, its death at every step, and what is left afterwards."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloche_server.node.launch.prepare import ensure_system_user
from tests.unit.keeper import harness
from tests.unit.keeper.harness import FAULTS, Node, Refused, new_id, run_raw, spec, wait_until

BOOT_POINTS = (
    "keeper.boot.record",
    "keeper.boot.directories",
    "keeper.boot.cgroups",
    "keeper.boot.process",
    "keeper.boot.maps",
    "keeper.boot.spawned",
    "keeper.boot.created",
    "keeper.boot.done",
)
END_POINTS = (
    "keeper.kill.recorded",
    "keeper.undo.process",
    "keeper.undo.cgroups",
    "keeper.undo.directories",
    "keeper.undo.record",
)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with harness.node(more=("--program", str(FAULTS))) as made:
        made.ask("start_watch")
        yield made


@pytest.fixture
def open_path() -> Iterator[Path]:
    """Not tmp_path: that is below a directory that other runs close again and again."""
    with tempfile.TemporaryDirectory(prefix="cloche-test-") as made:
        yield Path(made)


def plant(node: Node, how: str, point: str) -> Path:
    fault = node.paths.state / "fault"
    fault.write_text(f"{how} {point}")
    fault.chmod(0o666)
    return fault


def raw(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def keeper_uid(node: Node) -> int:
    return os.stat(node.paths.keeper_socket).st_uid


def ready(node: Node) -> bool:
    """A keeper is in office and has nothing half done."""
    try:
        node.ask("everything")
    except Refused:
        return False
    return True


@pytest.mark.req("LIF-6")
def test_a_second_daemon_is_told_busy(node: Node) -> None:
    (answer,) = run_raw(node.paths, keeper_uid(node), [raw(id=1, verb="hello", generation=1)])
    assert answer["error"]["code"] == "busy"


@pytest.mark.req("ISO-7")
def test_refusals_over_the_socket(node: Node) -> None:
    good = json.loads(spec().to_json())
    messages = [
        raw(id=1, verb="list", after=""),
        raw(id=2, verb="boot", spec=good),
        raw(id=3, verb="kill", sandbox=new_id()),
        b"not json",
        b"x" * 65537,
        raw(id=4, verb="exec", argv=["/bin/sh"]),
        raw(id=5, verb="hello", generation=99),
        raw(id=6, verb="boot", spec={**good, "image_file": "../../etc/shadow"}),
        raw(id=7, verb="boot", spec={**good, "uid": 0}),
    ]
    codes = [answer["error"]["code"] for answer in run_raw(node.paths, keeper_uid(node), messages)]
    assert codes == [
        "hello_first",
        "hello_first",
        "hello_first",
        "malformed",
        "too_large",
        "unknown_verb",
        "generation",
        "bad_spec",
        "bad_spec",
    ]
    assert node.ask("everything") == []


@pytest.mark.req("ISO-7")
@pytest.mark.skipif(os.getuid() != 0, reason="needs a second user")
def test_another_user_is_not_heard(node: Node) -> None:
    with pytest.raises(AssertionError, match=r"PermissionError|ConnectionResetError|IndexError"):
        run_raw(node.paths, 65534, [raw(id=1, verb="hello", generation=1)])


@pytest.mark.req("ISO-7")
def test_images_are_plain_files_below_their_directory(open_path: Path) -> None:
    images = open_path / "images"
    images.mkdir()
    (open_path / "secret").write_text("x")
    (images / "link").symlink_to(open_path / "secret")
    (images / "closed").write_text("x")
    (images / "closed").chmod(0o600)
    (images / "directory").mkdir()
    os.mkfifo(images / "fifo", 0o644)
    if os.getuid() == 0:  # the node's user must be able to enter it; whether others can is the images' own affair
        user = ensure_system_user()
        for path in (open_path, images, images / "closed"):
            os.chown(path, user.pw_uid, user.pw_gid)
    with harness.node(images=images) as made:
        for name in ("link", "closed", "directory", "fifo", "absent"):
            wanted = spec(image_file=name)
            with pytest.raises(Refused) as caught:
                made.boot(wanted)
            assert caught.value.code == "image_not_found", name
            assert made.left(wanted.id) == []


@pytest.mark.req("LIF-2")
@pytest.mark.parametrize("point", BOOT_POINTS)
def test_a_step_that_fails_leaves_nothing(node: Node, point: str) -> None:
    wait_until(lambda: ready(node))
    fault = plant(node, "fail", point)
    wanted = spec()
    with pytest.raises(Refused):
        node.boot(wanted)
    assert not fault.exists(), "the point was never reached"
    assert node.left(wanted.id) == []
    assert node.ask("everything") == []


@pytest.mark.req("LIF-2")
@pytest.mark.req("LIF-6")
@pytest.mark.parametrize("point", BOOT_POINTS)
def test_a_keeper_killed_while_booting_leaves_nothing(node: Node, point: str) -> None:
    wait_until(lambda: ready(node))
    before = node.keeper_pid()
    plant(node, "kill", point)
    wanted = spec()
    with pytest.raises(Refused):
        node.boot(wanted)
    assert wait_until(lambda: ready(node) and node.keeper_pid() != before)
    assert wait_until(lambda: node.left(wanted.id) == []), node.left(wanted.id)
    assert node.ask("everything") == []


@pytest.mark.req("LIF-2")
@pytest.mark.req("LIF-6")
@pytest.mark.parametrize("point", END_POINTS)
def test_a_keeper_killed_while_ending_leaves_nothing(node: Node, point: str) -> None:
    wait_until(lambda: ready(node))
    wanted = spec()
    node.boot(wanted)
    before = node.keeper_pid()
    plant(node, "kill", point)
    ended = node.ask("kill", sandbox=wanted.id)
    assert ended["oom_kills"] == 0
    assert wait_until(lambda: ready(node) and node.keeper_pid() != before)
    assert wait_until(lambda: node.left(wanted.id) == []), node.left(wanted.id)


@pytest.mark.req("LIF-6")
def test_a_keepers_death_is_not_noticed_by_a_sandbox(node: Node, long_run: bool) -> None:
    wait_until(lambda: ready(node))
    wanted = spec()
    booted = node.boot(wanted)
    node.ask("start", sandbox=wanted.id)
    guest = harness.Guest(node, wanted.id)
    guest.hello()
    guest.bind()
    for number in range(20 if long_run else 3):
        before = node.keeper_pid()
        os.kill(before, signal.SIGKILL)
        assert wait_until(lambda before=before: ready(node) and node.keeper_pid() != before)
        assert wait_until(lambda: node.ask("everything")[0]["channel"], 5)
        end, output = guest.run("/bin/echo", str(number))
        assert (end["ok"]["code"], output) == (0, f"{number}\n".encode())
    (row,) = node.ask("everything")
    assert row["alive"]
    assert row["channel"]
    assert Path(f"/proc/{booted['pid']}").exists()
    node.ask("seal", sandbox=wanted.id)
    node.ask("kill", sandbox=wanted.id)
    assert node.left(wanted.id) == []
    assert wait_until(lambda: _zombies(node.pid) == []), "the daemon left a zombie"


def _zombies(parent: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] == "Z" and int(fields[1]) == parent:
            found.append(stat.parent.name)
    return found


@pytest.mark.req("LIF-6")
def test_a_daemons_death_is_not_noticed_by_a_sandbox() -> None:
    with harness.node() as made:
        wanted = spec()
        booted = made.boot(wanted)
        made.ask("start", sandbox=wanted.id)
        guest = harness.Guest(made, wanted.id)
        guest.hello()
        guest.bind()
        keeper = made.keeper_pid()
        made.kill_daemon()
        made.start()
        assert made.keeper_pid() == keeper, "the keeper was replaced without need"
        assert made.ask("adopt", spec=json.loads(wanted.to_json()))["pid"] == booted["pid"]
        end, output = guest.run("/bin/echo", "again")
        assert (end["ok"]["code"], output) == (0, b"again\n")
        # Now the keeper too: the new daemon found the namespace by itself.
        os.kill(keeper, signal.SIGKILL)
        made.ask("replace")
        assert made.keeper_pid() != keeper
        assert made.ask("everything")[0]["channel"]
        end, output = guest.run("/bin/echo", "once more")
        assert output == b"once more\n"
        made.ask("kill", sandbox=wanted.id)
        assert made.left(wanted.id) == []


@pytest.mark.req("LIF-6")
def test_both_dead_at_once_is_cleaned_up_by_the_next() -> None:
    with harness.node() as made:
        wanted = spec()
        booted = made.boot(wanted)
        os.kill(made.keeper_pid(), signal.SIGKILL)
        made.kill_daemon()
        assert Path(f"/proc/{booted['pid']}").exists()
        made.start()
        (row,) = made.ask("everything")
        assert row["alive"]
        assert not row["channel"], "its channel died with its holders"
        assert made.ask("adopt", spec=json.loads(wanted.to_json())) is None
        assert made.left(wanted.id) == []


@pytest.mark.req("RES-1")
def test_out_of_memory_is_counted(node: Node) -> None:
    wait_until(lambda: ready(node))
    wanted = spec(memory_bytes=64 << 20)
    node.boot(wanted)
    node.ask("start", sandbox=wanted.id)
    guest = harness.Guest(node, wanted.id)
    guest.hello()
    guest.bind()
    with pytest.raises((Refused, AssertionError)):
        guest.run("/usr/bin/python3", "-c", "b = bytearray(200 << 20); print(len(b))")
    node.ask("wait_dead", sandbox=wanted.id)
    ended = node.ask("kill", sandbox=wanted.id)
    assert ended["oom_kills"] >= 1
    assert ended["status"] == signal.SIGKILL
    assert node.left(wanted.id) == []


@pytest.mark.req("LIF-2")
def test_several_at_once_and_again(node: Node, long_run: bool) -> None:
    wait_until(lambda: ready(node))
    before = (node.ask("descriptors"), len(os.listdir(f"/proc/{node.keeper_pid()}/fd")))
    for _ in range(20 if long_run else 2):
        wanted = [spec() for _ in range(5)]
        node.known |= {one.id for one in wanted}
        booted = node.ask("boot_many", specs=[json.loads(one.to_json()) for one in wanted])
        assert len({one["host_uid"] for one in booted}) == 5
        for one in wanted:
            node.ask("kill", sandbox=one.id)
            assert node.left(one.id) == []
    keeper_fds = Path(f"/proc/{node.keeper_pid()}/fd")
    assert wait_until(lambda: node.ask("descriptors") <= before[0]), "the daemon keeps descriptors"
    assert wait_until(lambda: len(os.listdir(keeper_fds)) <= before[1]), "the keeper keeps descriptors"


@pytest.mark.req("LIF-2")
def test_kill_while_booting(node: Node) -> None:
    wait_until(lambda: ready(node))
    wanted = spec()
    uid = keeper_uid(node)
    assert uid
    # Two requests in flight on one connection: the kill overtakes the boot.
    node.known.add(wanted.id)
    with pytest.raises(Refused):
        node.ask("boot_and_kill", spec=json.loads(wanted.to_json()))
    assert wait_until(lambda: node.left(wanted.id) == []), node.left(wanted.id)
    assert node.ask("everything") == []


@pytest.mark.req("LIF-2")
def test_an_empty_keeper_leaves_no_directory() -> None:
    with harness.node() as made:
        wanted = spec()
        made.boot(wanted)
        made.ask("kill", sandbox=wanted.id)
        made.ask("stop_keeper", purge=True)
        assert not made.paths.keeper_dir.exists()


@pytest.mark.req("LIF-2")
def test_an_undo_that_fails_is_finished_by_kill(node: Node) -> None:
    wait_until(lambda: ready(node))
    wanted = spec(image_file="no-such.erofs")
    plant(node, "fail", "keeper.undo.directories")
    with pytest.raises(Refused):
        node.boot(wanted)
    node.ask("end_by_id", sandbox=wanted.id)
    assert node.left(wanted.id) == []
    with pytest.raises(Refused, match="no-such"):
        node.boot(wanted)
