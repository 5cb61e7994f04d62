"""An engine that lies on its control socket: the create fails by name, at once, and nobody else notices."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cloche.client import Sandbox
from cloche.wire.errors import ClocheError
from cloche_server.node.launch.up import up
from tests.promises.hostile import (
    GROWTH_BYTES_MAX,
    daemon_peak_bytes,
)
from tests.promises.nodes import RealNode, wait_until
from tests.promises.traces import traces

# ---------------------------------------------------------------- a sentry that lies


class FakeEngineNode(RealNode):
    """Its `runsc` is `evil/sentry.c`: no guest ever runs, and the control socket answers as `mode` says."""

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.plant = base / "plant"
        engine = self.plant / "engine"
        engine.mkdir(parents=True)
        here = Path(__file__).parent / "evil"
        shutil.copyfile(here / "fake_engine_daemon.py", self.plant / "fake_engine_daemon.py")
        argv = ["gcc", "-O2", "-static", "-Wall", "-Werror", "-o", str(engine / "runsc"), str(here / "sentry.c")]
        subprocess.run(argv, check=True)
        self.lie("silent")

    def lie(self, mode: str) -> None:
        (self.plant / "engine" / "mode").write_text(mode)

    def start(self) -> None:
        program = (str(self.plant / "fake_engine_daemon.py"), str(self.plant))
        self.pid = up(self.paths, mode=self.mode, program=program)
        self.starts += 1


@contextmanager
def fake_engine_node() -> Iterator[FakeEngineNode]:
    base = Path(tempfile.mkdtemp(prefix="cloche-fake-"))
    base.chmod(0o755)
    node = FakeEngineNode(base)
    try:
        node.start()
        yield node
    finally:
        node.stop()
        shutil.rmtree(base, ignore_errors=True)


@pytest.mark.req("ISO-7")
@pytest.mark.timeout(600)
def test_a_sentry_that_lies_on_its_control_socket(long_run: bool) -> None:
    modes = ["garbage", "brackets", "braces", "string", "list", "escapes", "closes"]
    with fake_engine_node() as node, node.client(request_timeout_s=120) as client:
        client.info()  # its connection is there before descriptors are counted
        before, peak = traces(node), daemon_peak_bytes(node)
        told = {}
        for mode in modes + (["slow", "silent"] if long_run else []):
            node.lie(mode)
            began, slowest = time.monotonic(), [0.0]
            creating = threading.Thread(target=lambda: told.update({mode: _refusal(node)}))  # noqa: B023
            creating.start()
            while creating.is_alive():
                asked = time.perf_counter()
                client.info()
                slowest.append(time.perf_counter() - asked)
            creating.join()
            print(
                f"\nsentry {mode}: {told[mode]} after {time.monotonic() - began:.1f} s, API at worst {max(slowest) * 1000:.0f} ms"
            )
            assert max(slowest) < 1.0, "the API answers meanwhile"
            assert told[mode].isprintable()
        try:
            wait_until(lambda: traces(node).more_than(before) == {}, 30)
        except AssertionError:
            raise AssertionError(f"left: {traces(node).more_than(before)}") from None
        assert daemon_peak_bytes(node) - peak < GROWTH_BYTES_MAX
        assert all(
            re.match(r"(create_failed|protocol_error|unresponsive|host_failure)\b", text) for text in told.values()
        ), told


def _refusal(node: RealNode) -> str:
    with node.client(request_timeout_s=120) as client:
        try:
            Sandbox.create(node=client, memory_mb=64, disk_mb=64, retain_s=0)
        except ClocheError as failed:
            return f"{failed.code}: {failed.message}"
    return "created"
