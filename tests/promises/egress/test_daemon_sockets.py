"""Where the daemon connects to, seen by strace: its own unix sockets, its name server, and what a rule let a sandbox reach."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.promises.egress.inside import connect, get, talk
from tests.promises.egress.worlds import EVIL, WEB, World, needs_world, world_node
from tests.promises.nodes import RealNode, wait_until

pytestmark = [needs_world, pytest.mark.timeout(120)]


@pytest.fixture
def own_node(earth: World) -> Iterator[RealNode]:
    with world_node(earth) as made:
        yield made


@pytest.mark.req("NET-4")
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_daemon_connects_only_to_what_was_checked(own_node: RealNode, earth: World, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    earth.dns.answers[f"dyn.{WEB}"] = [earth.web]
    argv = [
        "strace",
        "-f",
        "-qq",
        "-e",
        "trace=connect,sendto,bind",
        "-e",
        "signal=none",
        "-o",
        str(trace),
        "-p",
        str(own_node.pid),
    ]
    tracer = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: "TracerPid:\t0" not in Path(f"/proc/{own_node.pid}/status").read_text(), what="strace")
        with own_node.sandbox(egress=[WEB, f"*.{WEB}"]) as box:
            said = talk(
                box,
                get(f"http://{WEB}/echo", "Connection: close"),
                get(f"http://dyn.{WEB}/echo", "Connection: close"),
                connect(EVIL),
                connect("169.254.169.254", 80),
            )
            assert [one.status for one in said] == [200, 200, 403, 403]
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait(20)
    text = trace.read_text()
    reached = set(re.findall(r'connect\(.*?sin6?_port=htons\((\d+)\).*?"([0-9a-fA-F.:]+)"', text))
    assert ("80", earth.web) in reached
    assert reached <= {("80", earth.web), ("53", earth.dns_address)}, reached
