"""A secret's life on a real node: a placeholder inside, the value only in the request outside, and an end with the sandbox."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from cloche.client import Node, Sandbox
from cloche.wire.nodes import Event
from cloche_server.interceptor.forms import value_forms
from tests.promises.egress.checkpoints import blocks_of, checkpoint
from tests.promises.egress.worlds import WEB, World, needs_world
from tests.promises.nodes import RealNode, wait_until
from tests.unit.secrets.room import Server, token

pytestmark = [needs_world, pytest.mark.timeout(180)]

VALUE = "real-value-3d9c51f07a"
NEXT = "next-value-8b1e20c4aa"
MARKER = "planted-marker-77f0e3d1"
BOUND = ("--host", WEB, "--header", "Authorization: Bearer {}")
HEADER = {"kind": "header", "name": "Authorization", "format": "Bearer {}"}
ASK = """
import os, sys, urllib.request, urllib.error
request = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + os.environ["TOKEN"]})
try:
    with urllib.request.urlopen(request, timeout=30) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as refused:
    print(refused.code, refused.read().decode())
"""
PLACEHOLDER = re.compile(r"cloche_ph_[A-Za-z0-9]{32}")
BLOCK = 4 << 20


@pytest.fixture
def client(node: RealNode) -> Iterator[Node]:
    with node.client() as made:
        yield made


@pytest.fixture
def box(node: RealNode, client: Node) -> Iterator[Sandbox]:
    client.secrets.set("TOKEN", VALUE, hosts=[WEB], places=[HEADER])
    with node.sandbox(egress=[WEB], secrets=["TOKEN"]) as made:
        yield made


def ask(box: Sandbox, path: str) -> str:
    result = box.run(["python3", "-c", ASK, f"https://{WEB}{path}"])
    assert not result.stderr, result.stderr
    return result.stdout


def credentials(earth: World, path: str) -> list[str]:
    """What stood in the header of the requests that reached the server."""
    return [dict(each["headers"])["authorization"] for each in earth.requests(kind="request", path=path)]


def placeholder(box: Sandbox) -> str:
    return box.run(["printenv", "TOKEN"]).stdout.strip()


@pytest.mark.req("SEC-1")
@pytest.mark.req("SEC-2")
def test_inside_stands_a_placeholder_and_the_server_gets_the_value(
    node: RealNode, earth: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", VALUE)
    done = node.cloche("secret", "set", "TOKEN", "--from", "env", *BOUND)
    assert done.returncode == 0, done.stderr
    with node.sandbox(egress=[WEB], secrets=["TOKEN"]) as box:
        assert PLACEHOLDER.fullmatch(placeholder(box))
        said = ask(box, "/headers?first")
        assert said.startswith("200 ")
        assert credentials(earth, "/headers")[-1] == f"Bearer {VALUE}"
        assert not holding([said.encode()], VALUE), "a server that echoes gives the value away"
        assert placeholder(box)[: len(VALUE)] in said, "its length stays true, so a long placeholder is cut"
        assert box.info().egress.secrets == ["TOKEN"]


@pytest.mark.req("SEC-4")
def test_a_lease_ends_within_a_second_of_its_sandbox(box: Sandbox, client: Node) -> None:
    assert client.secrets.list()[0].leases == 1
    box.kill()
    assert client.secrets.list()[0].leases == 0
    at = {event.kind: event for event in client.events(box.id, limit=1000).events}
    assert _between(at["sandbox.ended"], at["secret.released"]) <= 1.0


def _between(one: Event, other: Event) -> float:
    return abs(other.at - one.at)


@pytest.mark.req("SEC-4")
def test_a_sandbox_that_ends_by_itself_gives_it_back_too(node: RealNode, client: Node) -> None:
    client.secrets.set("TOKEN", VALUE, hosts=[WEB], places=[HEADER])
    with node.sandbox(egress=[WEB], secrets=["TOKEN"], ttl_s=2) as box:
        wait_until(lambda: box.info().ended is not None, what="its time to live")
        assert client.secrets.list()[0].leases == 0


@pytest.mark.req("SEC-4")
def test_a_removed_secret_is_of_no_use_at_once(box: Sandbox, client: Node, earth: World) -> None:
    assert ask(box, "/headers").startswith("200 ")
    before = len(credentials(earth, "/headers"))
    client.secrets.remove("TOKEN")
    said = ask(box, "/headers")
    assert said.startswith("403 "), said
    assert len(credentials(earth, "/headers")) == before, "a request went out"


@pytest.mark.req("SEC-4")
def test_a_secret_that_is_set_anew_is_used_by_those_who_hold_it(box: Sandbox, client: Node, earth: World) -> None:
    inside = placeholder(box)
    client.secrets.set("TOKEN", NEXT, hosts=[WEB], places=[HEADER])
    assert ask(box, "/headers").startswith("200 ")
    assert credentials(earth, "/headers")[-1] == f"Bearer {NEXT}"
    assert placeholder(box) == inside


@pytest.mark.req("SEC-4")
def test_minted_values_are_renewed_while_the_sandbox_lives(node: RealNode, client: Node, earth: World) -> None:
    with Server(token("minted-one-5512aa"), token("minted-two-9931bb")) as mint:
        source = {"kind": "http", "url": mint.url, "field": "data.token", "ttl_s": 4}
        client.secrets.set("TOKEN", source=source, hosts=[WEB], places=[HEADER])
        with node.sandbox(egress=[WEB], secrets=["TOKEN"]) as box:
            assert ask(box, "/headers").startswith("200 ")
            assert credentials(earth, "/headers")[-1] == "Bearer minted-one-5512aa"
            kinds = lambda: [event.kind for event in client.events(box.id, limit=1000).events]  # noqa: E731
            wait_until(lambda: "secret.renewed" in kinds(), what="a renewal")
            assert ask(box, "/headers").startswith("200 ")
            assert credentials(earth, "/headers")[-1] == "Bearer minted-two-9931bb"
            mint.answer((500, b""))
            wait_until(lambda: "secret.not_renewed" in kinds(), what="a failed renewal")
            wait_until(lambda: ask(box, "/headers").startswith("403 "), what="the end of the last value")


@pytest.mark.req("SEC-2")
@pytest.mark.req("NET-9")
def test_a_daemon_that_was_killed_leaves_the_placeholder_and_leases_anew(
    box: Sandbox, node: RealNode, earth: World
) -> None:
    inside = placeholder(box)
    node.restart_daemon()
    assert placeholder(box) == inside
    wait_until(lambda: ask(box, "/headers").startswith("200 "), what="the interceptor of the new daemon")
    assert credentials(earth, "/headers")[-1] == f"Bearer {VALUE}"


@pytest.mark.req("SEC-2")
def test_what_is_missing_or_taken_is_named_before_anything_starts(node: RealNode, client: Node) -> None:
    done = node.cloche("run", "--secret", "NOT_THERE", "--", "true")
    assert done.returncode == 125
    assert b"secret_not_found" in done.stderr
    client.secrets.set("TOKEN", source={"kind": "command", "argv": ["/bin/false"]}, hosts=[WEB], places=[HEADER])
    done = node.cloche("run", "--secret", "TOKEN", "--", "true")
    assert b"secret_unavailable: TOKEN: its command failed" in done.stderr, done.stderr


# --- the scan ---------------------------------------------------------------------------------------


def holding(parts: Iterable[bytes], value: str) -> int:
    """How many parts hold the value, in any form that a server may write it in. Parts overlap, so that none is cut."""
    forms, found, tail = value_forms(value.encode()), 0, b""
    for part in parts:
        both = tail + part
        found += any(form in both for form in forms)
        tail = part[-512:]
    return found


def files_below(folder: Path) -> Iterator[bytes]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.suffix != ".erofs":
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    yield block


def memory_of(sandbox: str) -> Iterator[bytes]:
    """The guest's pages, as the sentry holds them: every data block of its memory files."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if sandbox not in (process / "cgroup").read_text() or not _has_memory(process):
                continue
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        for fd in (process / "fd").iterdir():
            if "runsc-memory" in os.readlink(fd):
                yield from _data_of(fd)


def _has_memory(process: Path) -> bool:
    return any("runsc-memory" in os.readlink(fd) for fd in (process / "fd").iterdir())


def _data_of(path: Path) -> Iterator[bytes]:
    fd = os.open(path, os.O_RDONLY)
    try:
        offset, end = 0, os.lseek(fd, 0, os.SEEK_END)
        while offset < end:
            try:
                offset = os.lseek(fd, offset, os.SEEK_DATA)
            except OSError:  # no more data
                return
            hole = os.lseek(fd, offset, os.SEEK_HOLE)
            while offset < hole:
                block = os.pread(fd, min(BLOCK, hole - offset), offset)
                yield block
                offset += len(block)
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def used(node: RealNode, earth: World) -> Iterator[Sandbox]:
    """Its secret was really used; and a marker is in the memory of a process, so that a look can be seen to find something."""
    with node.client() as client:
        client.secrets.set("TOKEN", VALUE, hosts=[WEB], places=[HEADER])
        with node.sandbox(egress=[WEB], secrets=["TOKEN"]) as made:
            held = made.commands.start(["python3", "-c", f"import time; held = '{MARKER}'; time.sleep(600)"])
            wait_until(lambda: holding(memory_of(made.id), MARKER), what="the marker in the guest's memory")
            assert ask(made, "/headers").startswith("200 ")
            assert credentials(earth, "/headers")[-1] == f"Bearer {VALUE}"
            yield made
            held.kill()


@pytest.mark.req("SEC-1")
def test_no_page_or_file_of_the_guest_holds_the_value(used: Sandbox) -> None:
    assert holding(memory_of(used.id), MARKER), "the same look finds what is there"
    assert not holding(memory_of(used.id), VALUE), "a page of the guest holds it"
    assert not holding(_tree(used), VALUE)


@pytest.mark.req("SEC-1")
def test_no_checkpoint_image_holds_the_value(used: Sandbox, node: RealNode, tmp_path: Path) -> None:
    """The engine's own image of the running sandbox: its state, and its pages as they are."""
    files = checkpoint(node, used.id, tmp_path)
    assert holding(blocks_of(files), MARKER), "the same look finds what is there"
    assert holding(blocks_of(files), placeholder(used)), "and the placeholder, which may be there"
    assert not holding(blocks_of(files), VALUE)


@pytest.mark.req("SEC-1")
def test_no_file_log_record_or_answer_holds_the_value(used: Sandbox, node: RealNode) -> None:
    with node.client() as client:
        answers = [
            used.info().model_dump_json(),
            json.dumps([each.model_dump() for each in used.egress.records()]),
            client.events(limit=1000).model_dump_json(),
            json.dumps([each.model_dump() for each in client.secrets.list()]),
            json.dumps([each.view.model_dump(mode="json") for each in used.commands.list()]),
        ]
    assert MARKER in answers[-1], "the same look finds what is there"
    assert not holding([each.encode() for each in answers], VALUE)
    assert not holding([node.log().encode()], VALUE)
    assert not holding(files_below(node.paths.state), VALUE)
    assert holding(files_below(node.paths.state), MARKER), "the same look finds what is there"


def _tree(box: Sandbox) -> Iterator[bytes]:
    """Everything inside that a command could read, and every process's environment."""
    look = "cat /proc/[0-9]*/environ /run/cloche/* 2>/dev/null; tar -cf - --one-file-system /etc /root /tmp /workspace 2>/dev/null"
    result = box.run(["sh", "-c", f"({look}) | base64"], user="root")
    import base64

    yield base64.b64decode(result.stdout)


@pytest.mark.req("SEC-1")
def test_a_copied_data_directory_does_not_open(box: Sandbox, node: RealNode, tmp_path: Path) -> None:
    import asyncio
    import shutil

    from cloche.wire.errors import ClocheError
    from cloche_server.secrets.service import Secrets
    from tests.unit.secrets.room import ROOT as ADMIN

    shutil.copytree(node.paths.state / "secrets", tmp_path / "secrets")
    assert list((tmp_path / "secrets").glob("*.sealed"))
    thief = Secrets(tmp_path / "secrets", tmp_path / "config")
    with pytest.raises(ClocheError) as raised:
        asyncio.run(thief.list(ADMIN))
    assert raised.value.code == "secret_unavailable"
    assert not (tmp_path / "config" / "secrets.key").exists()
