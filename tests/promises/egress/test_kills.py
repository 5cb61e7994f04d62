"""Gate and interceptor killed (-9) under load: everything fails closed, comes back by itself, and no sandbox ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cloche.client import Sandbox
from cloche.wire.egress import EgressRule
from cloche.wire.sandboxes import SandboxState
from tests.promises.egress.inside import connect, get, talk
from tests.promises.egress.worlds import EVIL, WEB, World, needs_clients, needs_world, processes, world_node
from tests.promises.nodes import RealNode, wait_until

pytestmark = [needs_world, needs_clients, pytest.mark.timeout(240)]

LOAD = """
while :; do curl -sS -m 5 -o /dev/null -w '%{http_code}\\n' https://web.test/bytes/200000 2>/dev/null || echo failed; done
"""
DIRECT = """
while :; do curl -sS -m 2 -o /dev/null -w '%{http_code}\\n' http://evil.test/ 2>/dev/null || echo failed; done
"""


@pytest.fixture
def own_node(earth: World) -> Iterator[RealNode]:
    with world_node(earth) as made:
        yield made


@contextmanager
def under_load(box: Sandbox) -> Iterator[None]:
    """Two that download and one that tries what it may not, for the time of the block."""
    running = [box.commands.start(["sh", "-c", text], output_bytes_max=1 << 20) for text in (LOAD, LOAD, DIRECT)]
    try:
        assert "200" in next(iter(running[0].output())).text
        yield
    finally:
        for each in running:
            each.kill()


def answers(box: Sandbox, flags: str = "") -> bool:
    line = f"curl -sS -m 5 {flags} -o /dev/null -w '%{{http_code}}' https://{WEB}/echo"
    return box.run(line, timeout_s=20).stdout == "200"


@pytest.mark.req("NET-9")
def test_the_gate_dies(own_node: RealNode, earth: World, long_run: bool) -> None:
    """While it is dead nothing gets out; its successor has the same policy, and the sandbox has not ended."""
    with own_node.sandbox(
        image="clients", memory_mb=512, cpus=2, egress=[WEB], env={"CURL_CA_BUNDLE": "/workspace/ca.pem"}
    ) as box:
        box.files.write("/workspace/ca.pem", earth.ca)
        policy = box.info().egress.policy
        codes: list[str] = []
        with under_load(box):
            for _ in range(5 if long_run else 2):
                own_node.kill_daemon()
                earth.forget()
                threading.Event().wait(1.0)
                assert [each for each in earth.requests() if each["kind"] == "request"] == [], "nobody relays"
                own_node.start()
                wait_until(lambda: codes.append(talk(box, connect(EVIL))[0].code) or codes[-1], 30, "a verdict")
                assert codes[-1] == "no_rule", "its successor has another policy"
                wait_until(lambda: answers(box), 30, "the way out")
        view = box.info()
        assert view.state is SandboxState.RUNNING
        assert view.egress.policy == policy
        assert earth.evil.is_untouched, str(earth.evil)


@pytest.mark.req("NET-9")
def test_the_interceptor_dies(own_node: RealNode, earth: World, long_run: bool) -> None:
    """Its connections die with it; what needs it is never let through without it; it is started anew."""
    rules = [EgressRule(host=WEB, methods=["GET", "POST"], paths=["/bytes/**", "/echo"])]
    with own_node.sandbox(image="clients", memory_mb=512, cpus=2, egress=rules) as box:
        assert answers(box, "-d x")
        with under_load(box):
            for _ in range(5 if long_run else 2):
                wait_until(lambda: processes(own_node), 20, "an interceptor")
                earth.forget()
                for pid in processes(own_node):
                    os.kill(pid, signal.SIGKILL)
                one = f"curl -sS -m 5 -o /dev/null -w '%{{http_code}}\\n' https://{WEB}/forbidden"
                refused = box.run("; ".join([one] * 3), timeout_s=20)  # before and after its death is known
                assert "200" not in refused.stdout.split()
                assert earth.requests(path="/forbidden") == []
                wait_until(lambda: answers(box, "-d x"), 30, "an interceptor again")
        assert box.info().state is SandboxState.RUNNING
        (plain,) = talk(box, get(f"http://{EVIL}/"))
        assert plain.code == "no_rule"
        assert earth.evil.is_untouched, str(earth.evil)
