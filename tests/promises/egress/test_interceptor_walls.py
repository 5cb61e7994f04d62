"""What an interceptor could do that somebody took over: the double (`tests/unit/interception`) tries it behind the real walls.

It is started by the real launcher and keeper. Whatever it says or does, everything of it ends at once, and the next one works.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche_server.egress.interception import interpreter
from tests.promises.egress.interceptor_node import (
    LINEAGE,
    OTHER,
    SANDBOX,
    InterceptorNode,
    interceptor_node,
    only,
    opened,
    over,
    whole,
)
from tests.promises.nodes import wait_until
from tests.unit.keeper.harness import Refused

pytestmark = [
    pytest.mark.req("NET-9"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(interpreter.find() is None, reason="no Python that the interceptor can run with"),
]


@pytest.fixture(scope="module")
def hostile_node() -> Iterator[InterceptorNode]:
    with interceptor_node(real=False) as made:
        yield made


@pytest.fixture
def hostile(hostile_node: InterceptorNode) -> InterceptorNode:
    """With no process yet."""
    hostile_node.ask("again", idle_s=600.0)
    return hostile_node


@pytest.mark.req("ISO-4")
def test_what_it_could_do(hostile: InterceptorNode) -> None:
    seen = json.loads(whole(hostile, opened(hostile, "world.test")))
    assert seen["ids"] == [65534] * 6
    assert seen["groups"] == []
    assert seen["pid"] == 1
    assert seen["links"] == ["lo"]
    assert seen["loopback"] == seen["dial"] == "Network is unreachable"
    assert seen["dial6"] == "Cannot assign requested address"
    assert seen["raw"] == seen["packet"] == "Operation not permitted"
    assert set(seen["write"]) == {"Read-only file system"}
    assert seen["setuid"] == "Operation not permitted"
    assert seen["memory"] == "Permission denied", "it can be read by nobody, itself included"
    assert set(seen["env"]) <= {"LANG", "LC_CTYPE", "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX"}
    assert len(seen["descriptors"]) <= 5, "control, null, log, the connection's and the directory's own"


@pytest.mark.req("ISO-4")
def test_its_memory_is_bounded(hostile: InterceptorNode) -> None:
    before = opened(hostile, "echo.test")
    pid = only(hostile)["pid"]
    conn = opened(hostile, "grow.test")
    wait_until(lambda: over(hostile, conn) and over(hostile, before), what="the kernel's end of it")
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), what="its end")
    again = opened(hostile, "echo.test")
    hostile.ask("send", conn=again, text="here")
    assert hostile.ask("receive", conn=again) == "here"


@pytest.mark.req("ISO-4")
def test_its_processes_are_bounded(hostile: InterceptorNode) -> None:
    conn = opened(hostile, "breed.test")
    wait_until(lambda: hostile.ask("seen", conn=conn)["seen"], what="its count")
    [[_, code, text, *_]] = hostile.ask("seen", conn=conn)["seen"]
    assert code == "breed"
    assert 1 <= int(text) <= 16
    found = only(hostile)
    os.kill(found["pid"], signal.SIGKILL)
    wait_until(lambda: over(hostile, conn), what="its end")
    wait_until(lambda: hostile.left(found["id"]) == [], what="the end of all that it bred")


@pytest.mark.parametrize("how", ["garbage", "huge", "stranger", "type", "twice", "asks", "crash"])
def test_one_that_lies_is_ended_and_everything_with_it(hostile: InterceptorNode, how: str) -> None:
    innocent = opened(hostile, "echo.test")
    hostile.ask("send", conn=innocent, text="x")
    assert hostile.ask("receive", conn=innocent) == "x"
    before = only(hostile)
    lying = opened(hostile, f"{how}.test")
    wait_until(lambda: over(hostile, lying) and over(hostile, innocent), seconds=5, what="the end")
    assert hostile.ask("receive", conn=innocent, timeout_s=2) == ""
    assert hostile.ask("receive", conn=lying, timeout_s=2) == ""
    wait_until(lambda: hostile.left(str(before["id"])) == [], what="nothing of it")
    again = opened(hostile, "echo.test")
    hostile.ask("send", conn=again, text="again")
    assert hostile.ask("receive", conn=again) == "again"
    assert only(hostile)["id"] != before["id"]


@pytest.mark.req("SEC-1")
def test_it_knows_the_secrets_of_live_sandboxes_only(hostile: InterceptorNode) -> None:
    def known() -> set[str]:
        return set(json.loads(whole(hostile, opened(hostile, "tell.test")))["sandboxes"])

    for sandbox in (SANDBOX, OTHER):
        hostile.ask("secrets", sandbox=sandbox, lineage=LINEAGE, secrets={"TOKEN": "real-value-1"}, hosts=["a.test"])
    assert known() == {SANDBOX}, "the other had no connection through it yet"
    whole(hostile, int(hostile.ask("open", sandbox=OTHER, lineage=LINEAGE, host="tell.test")))
    assert known() == {SANDBOX, OTHER}
    hostile.ask("forget", sandbox=OTHER)
    assert known() == {SANDBOX}
    os.kill(only(hostile)["pid"], signal.SIGKILL)
    wait_until(lambda: not [row for row in hostile.ask("processes") if row["alive"]], what="its end")
    assert known() == {SANDBOX}


@pytest.mark.req("SEC-1")
@pytest.mark.parametrize("real", [False, True])
def test_it_ends_with_its_daemon(real: bool) -> None:
    """It holds secrets: nothing of them may stay behind until somebody starts the next daemon."""
    with interceptor_node(real=real) as node:
        opened(node, "echo.test")
        found = only(node)
        node.kill_daemon()
        wait_until(lambda: not Path(f"/proc/{found['pid']}").exists(), seconds=5, what="its end")
        node.start()
        assert [(row["id"], row["alive"]) for row in node.ask("processes")] == [(found["id"], False)]
        node.ask("end", sandbox=found["id"])
        assert node.left(str(found["id"])) == []


def test_a_keeper_that_was_started_without_it_gets_a_successor() -> None:
    with interceptor_node(real=False, more=("--blind", "yes")) as node:
        first = node.ask("facts")
        assert first["beside"] == {}
        conn = opened(node, "echo.test")
        node.ask("send", conn=conn, text="here")
        assert node.ask("receive", conn=conn) == "here"
        assert node.ask("facts")["pid"] != first["pid"]


def test_without_an_environment_it_is_missing_by_name() -> None:
    """The system user's pip has no index here."""
    with interceptor_node(real=False, environment=False, lock="nosuchpackage==1.0 --hash=sha256:" + "0" * 64) as node:
        with pytest.raises(Refused, match=r"nosuchpackage.*pip") as caught:
            opened(node, "echo.test")
        assert caught.value.code == "interceptor_missing"
        assert node.ask("processes") == []


def test_without_a_python_it_is_missing_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(interpreter.VARIABLE, "/nonexistent/python3.13")
    with interceptor_node(real=False, environment=False) as node:
        assert "Python 3.13" in node.ask("problem")
        with pytest.raises(Refused, match=interpreter.VARIABLE) as caught:
            opened(node, "echo.test")
        assert caught.value.code == "interceptor_missing"
