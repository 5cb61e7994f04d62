"""A node that is not there: what the command line sends to it, and answers of one's choice."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from cloche.cli import main
from cloche.wire.commands import Command, CommandState, Cursor, OutputState
from cloche.wire.ends import End, EndReason
from cloche.wire.images import ImageEvent
from cloche.wire.nodes import DiskUse, NodeView, Pruned
from cloche.wire.sandboxes import CreateSandbox, Isolation, Limits, Sandbox, SandboxState, Usage
from tests.unit.cli.fake_images import FakeImages

BOX = "sloc" + "k3m9q" + "a" * 11
COMMAND = "cloc" + "7f3k2" + "b" * 11


def make_box(**fields: Any) -> Sandbox:
    plain = {
        "id": BOX,
        "tenant": "tloc" + "0" * 16,
        "owner": "uid:4242",
        "lineage": "lloc" + "0" * 16,
        "image": "python",
        "state": SandboxState.RUNNING,
        "isolation": Isolation(**{"class": "gvisor"}, engine="runsc", version="1", digest="sha256:0"),
        "limits": Limits(),
        "created_at": 0.0,
        "age_s": 250.0,
        "ends_in_s": 3400.0,
        "usage": Usage(cpu_percent=2.0, memory_bytes=48 << 20, memory_peak_bytes=64 << 20),
        "first_command": COMMAND,
    }
    return Sandbox(**{**plain, **fields})


def make_command(end: End | None = None, **fields: Any) -> Command:
    plain = {
        "id": COMMAND,
        "sandbox": BOX,
        "argv": ["python3", "train.py"],
        "state": CommandState.ENDED if end else CommandState.RUNNING,
        "created_at": 0.0,
        "runtime_s": 2.1,
        "output": OutputState(end=0, complete=end is not None),
        "timeout_s": 300.0,
        "ended": end,
    }
    return Command(**{**plain, **fields})


class FakeCommand:
    """A command as the SDK shows it."""

    def __init__(self, node: "FakeNode", view: Command) -> None:
        self.node = node
        self.view = view
        self.id = view.id

    def output(self, *, follow: bool = True, from_: str | None = None) -> Iterator[Any]:
        for fd, data in self.node.chunks:
            yield SimpleNamespace(fd=fd, data=data, cursor=Cursor())
        self.view = make_command(self.node.end, argv=self.view.argv)

    def write_stdin(self, data: bytes) -> int:
        self.node.stdin += data
        return len(self.node.stdin)

    def close_stdin(self) -> None:
        self.node.stdin_closed.set()

    def signal(self, number: int) -> None:
        self.node.signals.append(number)

    def kill(self) -> None:
        self.node.killed.append(self.id)


class FakeBox:
    """A sandbox as the SDK shows it."""

    def __init__(self, node: "FakeNode", view: Sandbox) -> None:
        self.node = node
        self.view = view
        self.id = view.id

    def info(self) -> Sandbox:
        return self.view

    def kill(self) -> Sandbox:
        self.node.killed.append(self.id)
        return self.view


class FakeNode:
    """Answers what a test put into it; remembers what was asked."""

    def __init__(self) -> None:
        self.boxes = [make_box()]
        self.end = End(reason=EndReason.EXITED, exit_code=0)
        self.chunks: list[tuple[int, bytes]] = []
        self.created: list[CreateSandbox] = []
        self.started: list[tuple[str, dict[str, Any]]] = []
        self.killed: list[str] = []
        self.signals: list[int] = []
        self.stdin = b""
        self.stdin_closed = threading.Event()
        self.events: list[ImageEvent] = []
        self.images = FakeImages()

    def create(self, request: CreateSandbox, *, on_event: Callable[[ImageEvent], object] | None = None) -> FakeBox:
        self.created.append(request)
        for event in self.events:
            assert on_event is not None
            on_event(event)
        return FakeBox(self, self.boxes[0])

    def connect(self, _sandbox: str) -> FakeBox:
        return FakeBox(self, self.boxes[0])

    def list(self, *, include_ended: bool = False, usage: bool = False) -> Any:
        return [FakeBox(self, box) for box in self.boxes if include_ended or box.ended is None]

    def kill_all(self) -> int:
        return len(self.boxes)

    def find_command(self, _command: str) -> FakeCommand:
        return FakeCommand(self, make_command(self.end))

    def disk_use(self) -> DiskUse:
        return DiskUse(
            images_bytes=41 << 20,
            logs_bytes=0,
            layers_bytes=0,
            journal_bytes=100,
            ended_sandboxes=2,
            free_bytes=1 << 30,
        )

    def prune(self) -> Pruned:
        return Pruned(sandboxes=2, bytes=4096)

    def info(self) -> NodeView:
        return NodeView(
            version="0.1.0",
            mode="user",
            pid=1,
            engines={"gvisor": "release-20260905"},
            cgroup="cgroup v2",
            state_dir="/s",
            uptime_s=1.0,
            sandboxes_running=0,
            generation=1,
        )


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    from cloche.cli import session

    fake = FakeNode()

    @contextmanager
    def connect(*, start: bool = False) -> Iterator[FakeNode]:
        yield fake

    def commands_of(_node: FakeNode, sandbox: str) -> Any:
        def start(command: Any, **fields: Any) -> FakeCommand:
            fake.started.append((sandbox, {"argv": command, **fields}))
            return FakeCommand(fake, make_command(argv=command))

        return SimpleNamespace(start=start, list=lambda: [FakeCommand(fake, make_command(fake.end))])

    def first_command(_node: FakeNode, _box: FakeBox, request: CreateSandbox) -> FakeCommand:
        assert request.command is not None
        return FakeCommand(fake, make_command(argv=request.command.argv))

    monkeypatch.setattr(session, "connect", connect)
    monkeypatch.setattr(session, "commands_of", commands_of)
    monkeypatch.setattr(session, "first_command", first_command)
    return fake


@pytest.fixture
def cloche() -> Callable[..., Result]:
    """Runs a command line as the console script would, exit code and all."""

    def run(*arguments: str) -> Result:
        @click.command()
        def whole() -> None:
            raise click.exceptions.Exit(main.run(list(arguments)))

        return CliRunner().invoke(whole, [])

    return run
