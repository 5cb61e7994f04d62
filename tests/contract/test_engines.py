"""One suite for every engine: what `engines/contract.py` promises, on a real sandbox behind a real keeper."""

from __future__ import annotations

import json
import os
import signal
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cloche_server.channel.reset import NONCE_BYTES, Scan, reset_bytes, resume_bytes
from cloche_server.engines.spec import SandboxSpec
from tests.unit.keeper import harness
from tests.unit.keeper.harness import DATA, Guest, Node, Refused, frame, new_id, spec, wait_until

ENGINES = [
    "gvisor",
    pytest.param(
        "qemu", marks=pytest.mark.skipif(not harness.has_microvm(), reason="no microVM kernel was built here")
    ),
]


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with harness.node() as made:
        made.ask("start_watch")
        yield made


def started(node: Node, engine: str, wanted: SandboxSpec | None = None) -> tuple[str, dict[str, object], Guest]:
    wanted = wanted or spec(engine)
    booted = node.boot(wanted)
    node.ask("start", sandbox=wanted.id)
    guest = Guest(node, wanted.id)
    guest.hello()
    node.ask("seal", sandbox=wanted.id)
    guest.bind()
    return wanted.id, booted, guest


@pytest.mark.req("ISO-1")
@pytest.mark.req("EXE-1")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(180)
def test_the_life_of_a_sandbox(node: Node, engine: str) -> None:
    sandbox, booted, guest = started(node, engine)
    assert len(str(booted["digest"])) == 64
    end, output = guest.run("/usr/bin/python3", "-c", "print(6*7)")
    assert (end["ok"]["code"], output) == (0, b"42\n")
    stats = node.ask("stats", sandbox=sandbox)
    assert 0 < stats["memory_bytes"] <= stats["peak"] <= 256 << 20
    assert stats["cpu_s"] > 0
    node.ask("pause", sandbox=sandbox)
    node.ask("resume", sandbox=sandbox)
    end, output = guest.run("/bin/echo", "resumed")
    assert output == b"resumed\n"
    ended = node.ask("kill", sandbox=sandbox)
    assert ended["oom_kills"] == 0
    assert node.left(sandbox) == []


@pytest.mark.req("LIF-6")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(180)
def test_adopted_after_a_keepers_death(node: Node, engine: str) -> None:
    sandbox, booted, guest = started(node, engine)
    before = node.keeper_pid()
    os.kill(before, signal.SIGKILL)

    def again() -> bool:
        try:
            return node.keeper_pid() != before and node.ask("everything")[0]["channel"]
        except Refused:
            return False

    assert wait_until(again)
    _, output = guest.run("/bin/echo", "still here")
    assert output == b"still here\n"
    assert Path(f"/proc/{booted['pid']}").exists()
    node.ask("kill", sandbox=sandbox)
    assert node.left(sandbox) == []


@pytest.mark.req("LIF-6")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(180)
def test_attached_again_after_a_daemons_death(node: Node, engine: str) -> None:
    """RESET over the engine's carrier, with half a frame of the dead daemon in it: no byte is lost or repeated."""
    wanted = spec(engine)
    sandbox, booted, guest = started(node, engine, wanted)
    script = 'printf before; read line; printf "after $line"'
    stream = guest.start_command("/bin/sh", "-c", script)
    assert guest.expect(DATA, stream) == b"before"
    node.ask("send", sandbox=sandbox, hexed=frame(DATA, stream, b"x" * 1000)[:700].hex())
    node.kill_daemon()
    node.start()
    node.ask("start_watch")
    assert node.ask("adopt", spec=json.loads(wanted.to_json())) == {"pid": booted["pid"]}

    nonce = os.urandom(NONCE_BYTES)
    scan = Scan(nonce)
    node.ask("send", sandbox=sandbox, hexed=reset_bytes(nonce).hex())
    while (state := scan.feed(bytes.fromhex(node.ask("receive", sandbox=sandbox)))) is None:
        continue
    assert (state.streams[stream].sent, state.streams[stream].received) == (6, 0)
    again = Guest(node, sandbox, scan.rest, state.highest_host)
    # "before" was never written to a log: the guest is asked for it again.
    node.ask("send", sandbox=sandbox, hexed=resume_bytes(nonce, state, {stream: 0}).hex())
    node.ask("send", sandbox=sandbox, hexed=frame(DATA, stream, b"all\n").hex())
    assert again.result(stream)["ok"]["code"] == 0
    assert again.output(stream) == b"beforeafter all"
    assert again.run("/bin/echo", "next")[1] == b"next\n"
    node.ask("kill", sandbox=sandbox)
    assert node.left(sandbox) == []


@pytest.mark.req("LIF-2")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(180)
def test_a_killed_engine_is_noticed_and_removed(node: Node, engine: str) -> None:
    sandbox, booted, _ = started(node, engine)
    os.kill(int(str(booted["pid"])), signal.SIGKILL)
    began = time.monotonic()
    node.ask("wait_dead", sandbox=sandbox)
    assert time.monotonic() - began < 5
    ended = node.ask("kill", sandbox=sandbox)
    assert (ended["oom_kills"], ended["status"]) == (0, signal.SIGKILL)
    assert node.left(sandbox) == []


@pytest.mark.req("LIF-2")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_boot_that_fails_leaves_nothing(node: Node, engine: str) -> None:
    wanted = spec(engine, image_file="no-such.erofs")
    with pytest.raises(Refused) as caught:
        node.boot(wanted)
    assert caught.value.code == "image_not_found"
    assert node.left(wanted.id) == []


@pytest.mark.req("LIF-2")
@pytest.mark.parametrize("engine", ENGINES)
def test_an_id_is_used_once(node: Node, engine: str) -> None:
    wanted = spec(engine)
    node.boot(wanted)
    with pytest.raises(Refused) as caught:
        node.boot(wanted)
    assert caught.value.code == "create_failed"
    node.ask("kill", sandbox=wanted.id)
    assert node.left(wanted.id) == []


@pytest.mark.req("LIF-6")
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_not_alive_is_not_adopted(node: Node, engine: str) -> None:
    wanted = spec(engine, id=new_id())
    assert node.ask("adopt", spec=json.loads(wanted.to_json())) is None
    assert node.left(wanted.id) == []


# -------------------------------------------------------------------------- the writable layer


@contextmanager
def sink() -> Iterator[Path]:
    """A file that the node, another user, may write."""
    with tempfile.TemporaryDirectory(prefix="cloche-test-") as made:
        Path(made).chmod(0o755)
        path = Path(made) / "upper.tar"
        path.touch()
        path.chmod(0o666)
        yield path


CHANGES = """
set -e
cd /srv && echo one > made && chmod 4751 made && ln made linked && ln -s made soft && mkdir new && echo two > new/file
rm /etc/issue /etc/issue.net /etc/debian_version
chmod 700 /etc/passwd
"""


@pytest.mark.req("IMG-1")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(180)
def test_what_changed_comes_out_as_a_tar(node: Node, engine: str) -> None:
    sandbox, _, guest = started(node, engine)
    if not node.ask("capabilities", engine=engine)["export_upper"]:
        with sink() as path, pytest.raises(Refused) as caught:
            node.ask("export", sandbox=sandbox, path=str(path))
        assert caught.value.code == "unsupported"
        assert guest.run("/bin/echo", "untouched")[1] == b"untouched\n"
        node.ask("kill", sandbox=sandbox)
        return
    end, output = guest.run("/bin/sh", "-c", CHANGES, user="0:0")
    assert end["ok"]["code"] == 0, output
    assert guest.run("/bin/sh", "-c", "echo three > /workspace/own")[0]["ok"]["code"] == 0
    with sink() as path:
        assert node.ask("export", sandbox=sandbox, path=str(path)) == path.stat().st_size
        found = entries(path)
    file, link = sorted((found["srv/made"], found["srv/linked"]), key=tarfile.TarInfo.islnk)  # which is which: either
    assert (file.isreg(), file.mode, file.size) == (True, 0o4751, 4)
    assert (link.islnk(), link.linkname) == (True, file.name)
    assert (found["srv/soft"].issym(), found["srv/soft"].linkname) == (True, "made")
    assert (found["srv/new/file"].uid, found["workspace/own"].uid, found["workspace/own"].gid) == (0, 1000, 1000)
    assert found["etc/passwd"].mode == 0o700
    assert found["etc/passwd"].size > 0, "a file of the image that was only chmod'ed comes whole"
    assert "etc/group" not in found, "what did not change is not there"
    gone = [found[f"etc/{name}"] for name in ("debian_version", "issue", "issue.net")]
    [first] = [each for each in gone if each.ischr()]
    assert (first.devmajor, first.devminor) == (0, 0)
    assert [each.linkname for each in gone if each is not first] == [first.name] * 2, (
        "further whiteouts are links to it"
    )
    # It goes on, and a second export sees what came after the first.
    assert guest.run("/bin/sh", "-c", "echo more > /srv/later", user="0:0")[0]["ok"]["code"] == 0
    with sink() as path:
        node.ask("export", sandbox=sandbox, path=str(path))
        assert set(entries(path)) == {*found, "srv/later"}
    node.ask("kill", sandbox=sandbox)
    assert node.left(sandbox) == []


def entries(path: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(path) as tar:
        return {member.name.strip("./"): member for member in tar.getmembers()}


@pytest.mark.req("IMG-1")
@pytest.mark.req("RES-1")
@pytest.mark.timeout(180)
def test_an_export_has_a_limit_and_the_guest_goes_on(node: Node) -> None:
    sandbox, _, guest = started(node, "gvisor")
    assert guest.run("/bin/sh", "-c", "head -c 8000000 /dev/zero > /srv/big", user="0:0")[0]["ok"]["code"] == 0
    with sink() as path:
        size = node.ask("export", sandbox=sandbox, path=str(path))
    for limit in (0, 1, 1 << 20, size - 1):
        with sink() as path, pytest.raises(Refused) as caught:
            node.ask("export", sandbox=sandbox, path=str(path), bytes_max=limit)
        assert caught.value.code == "too_large"
        assert guest.run("/bin/echo", "on")[1] == b"on\n"
    with sink() as path:
        assert node.ask("export", sandbox=sandbox, path=str(path), bytes_max=size) == size
    with pytest.raises(Refused) as caught:
        node.ask("export_to_nobody", sandbox=sandbox)
    assert caught.value.code == "BrokenPipeError"
    assert guest.run("/bin/echo", "on")[1] == b"on\n"
    node.ask("pause", sandbox=sandbox)  # its control connection was replaced, and works
    node.ask("resume", sandbox=sandbox)
    node.ask("kill", sandbox=sandbox)
    assert node.left(sandbox) == []


@pytest.mark.req("IMG-1")
@pytest.mark.timeout(180)
def test_an_export_that_is_given_up_lets_the_guest_go_on(node: Node) -> None:
    """Into a pipe that nobody reads: cancelled while it stands, and nothing of it is left in the daemon."""
    sandbox, _, guest = started(node, "gvisor")
    assert guest.run("/bin/sh", "-c", "head -c 8000000 /dev/zero > /srv/big", user="0:0")[0]["ok"]["code"] == 0
    before = node.ask("descriptors")
    node.ask("export_and_cancel", sandbox=sandbox)
    assert guest.run("/bin/echo", "on")[1] == b"on\n"
    assert wait_until(lambda: node.ask("descriptors") <= before)
    node.ask("kill", sandbox=sandbox)
    assert node.left(sandbox) == []


@pytest.mark.req("IMG-1")
@pytest.mark.timeout(180)
def test_a_guest_that_writes_meanwhile_is_cut_at_one_moment(node: Node) -> None:
    sandbox, _, guest = started(node, "gvisor")
    script = "i=0; while :; do i=$((i+1)); echo $i > first; echo $i > second; [ $i = 1 ] && echo begun; done"
    stream = guest.start_command("/bin/sh", "-c", f"cd /workspace; {script}")
    guest.expect(DATA, stream)
    for _ in range(5):
        with sink() as path:
            node.ask("export", sandbox=sandbox, path=str(path))
            with tarfile.open(path) as tar:
                whole = {member.name.rpartition("/")[2]: tar.extractfile(member) for member in tar if member.isreg()}
                first, second = (int(whole[name].read() or 0) for name in ("first", "second"))  # type: ignore[union-attr]
        # Each is written after it was emptied: at most one of the two can be empty, and they are never further apart.
        assert first - second in (0, 1) or first * second == 0 < first + second
    node.ask("kill", sandbox=sandbox)
