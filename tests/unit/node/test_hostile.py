"""A guest that lies costs itself, and nobody else."""

import asyncio
import json
import os
import resource
import sys
from pathlib import Path

import pytest

from cloche.wire.commands import StartCommand
from cloche.wire.ends import EndReason
from cloche.wire.ids import DEFAULT_TENANT
from cloche.wire.sandboxes import CreateSandbox, SandboxState
from cloche_server.api.backend import Caller
from cloche_server.node.admission import Watermarks
from cloche_server.node.node import Config, Node
from tests.unit.node.native_engine import ROOT, NativeEngine, can_run

pytestmark = pytest.mark.skipif(not can_run(), reason="needs root, unshare and a built agent (just setup)")
ME = Caller(DEFAULT_TENANT, "uid:1000")
SMALL = {"disk_bytes": 1 << 24}


def make(root: Path) -> tuple[Node, NativeEngine]:
    images = root / "images"
    images.mkdir()
    (images / "python.erofs").touch()
    config = {"User": "0:0", "Env": [f"PATH={os.environ['PATH']}"], "WorkingDir": "/"}
    (images / "python.json").write_text(json.dumps({"config": config}))
    engine = NativeEngine()
    return Node(Config(root / "state", images, marks=Watermarks(disk_free_bytes_min=0)), {"gvisor": engine}), engine


@pytest.mark.req("EXE-5")
@pytest.mark.parametrize(
    ("mischief", "sandbox_reason", "command_reason"),
    [
        ("garbage", EndReason.PROTOCOL_ERROR, EndReason.PROTOCOL_ERROR),
        ("beyond_window", EndReason.PROTOCOL_ERROR, EndReason.PROTOCOL_ERROR),
        ("end_twice", EndReason.PROTOCOL_ERROR, EndReason.EXITED),
        ("data_after_end", None, EndReason.EXITED),
        ("foreign_stream", EndReason.PROTOCOL_ERROR, EndReason.PROTOCOL_ERROR),
        ("credit_back", EndReason.PROTOCOL_ERROR, EndReason.PROTOCOL_ERROR),
        ("strange_end", None, EndReason.PROTOCOL_ERROR),
        ("escapes", None, EndReason.NOT_STARTED),
        ("hang_up", EndReason.HOST_FAILURE, EndReason.HOST_FAILURE),
    ],
)
async def test_a_lie_ends_that_sandbox_alone(
    tmp_path: Path, mischief: str, sandbox_reason: EndReason | None, command_reason: EndReason
) -> None:
    node, engine = make(tmp_path)
    await node.start()
    honest = await node.create(ME, CreateSandbox(limits=SMALL), None)  # type: ignore[arg-type]
    engine._argv = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.unit.node.evil_agent", mischief]
    evil = await node.create(ME, CreateSandbox(limits=SMALL), None)  # type: ignore[arg-type]
    command = await node.start_command(ME, evil.id, StartCommand(argv=["x"]), None)
    ended = (await node.wait_command(ME, evil.id, command.id, 10)).ended
    assert ended is not None
    assert ended.reason is command_reason
    assert len(ended.detail or "") <= 500
    assert (ended.detail or "").isprintable()
    if sandbox_reason is not None:
        end = (await node.wait_ended(ME, evil.id, 10)).ended
        assert end is not None
        assert end.reason is sandbox_reason
        assert "\x1b" not in (end.detail or "")
    good = await node.start_command(ME, honest.id, StartCommand(argv=["true"]), None)
    end = (await node.wait_command(ME, honest.id, good.id, 10)).ended
    assert end is not None
    assert end.exit_code == 0
    await node.kill_all(ME)
    await node.stop()


@pytest.mark.req("EXE-3")
async def test_a_flood_of_opens_stays_bounded(tmp_path: Path) -> None:
    node, engine = make(tmp_path)
    await node.start()
    engine._argv = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.unit.node.evil_agent", "open_many"]
    evil = await node.create(ME, CreateSandbox(limits=SMALL), None)  # type: ignore[arg-type]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await node.start_command(ME, evil.id, StartCommand(argv=["x"]), None)
    await asyncio.sleep(1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    view = await node.get(ME, evil.id)
    assert view.state in SandboxState
    await node.kill_all(ME)
    await node.stop()
