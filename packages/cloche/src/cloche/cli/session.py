"""The node that this command line talks to; started first when a verb may start one.

Verbs use the SDK's objects (`Node`, `Sandbox`, `Command`) directly; here is only how they are got.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloche.client import Command, Commands, Node, Sandbox, Target
    from cloche.wire.images import ImageEvent
    from cloche.wire.sandboxes import CreateSandbox


@contextmanager
def connect(*, start: bool = False) -> "Iterator[Node]":
    """The usual node. `start`: when this user has none and none was named, one is started and left running."""
    from cloche.client import Node, choose_target

    target = choose_target()
    if target.chosen == "user" and not _listens(target):
        from cloche.cli import local

        if start:
            _start_one()
            target = choose_target()
        else:
            local.require_linux()
    with Node(target) as node:
        yield node


@contextmanager
def at_socket(path: Path) -> "Iterator[Node]":
    """The node that listens at this path."""
    from cloche.client import Node, Target

    with Node(Target("user", "http://cloche", str(path))) as node:
        yield node


def create(node: "Node", request: "CreateSandbox") -> "Sandbox":
    """A sandbox; when its image is not here, its pull is shown on stderr."""
    from cloche.cli.pulling import showing

    with contextlib.ExitStack() as stack:
        shown: list[Callable[[ImageEvent], None]] = []

        def show(event: "ImageEvent") -> None:
            if not shown:
                shown.append(stack.enter_context(showing(event.image or request.image or "image")))
            shown[0](event)

        if request.secrets and node.info().interceptor == "not made":
            from cloche.cli.progress import spinning

            stack.enter_context(spinning("making the interceptor's packages (once, about half a minute)"))
        return node.create(request, on_event=show)


def first_command(node: "Node", box: "Sandbox", request: "CreateSandbox") -> "Command":
    """The command that was created with its sandbox, without asking for what we know."""
    from cloche.client import Command
    from cloche.wire.commands import Command as CommandView
    from cloche.wire.commands import CommandState, OutputState

    assert request.command is not None
    assert box.view.first_command is not None
    view = CommandView(
        id=box.view.first_command,
        sandbox=box.id,
        argv=request.command.argv,
        state=CommandState.RUNNING,
        created_at=box.view.created_at,
        timeout_s=request.command.timeout_s,
        output=OutputState(),
        terminal=request.command.terminal is not None,
        stdin=request.command.stdin,
    )
    return Command(node.transport, view)


def commands_of(node: "Node", sandbox: str) -> "Commands":
    """The commands of a sandbox named by id, prefix or name, without looking it up first."""
    from cloche.client import Commands
    from cloche.client._sync.node import path_part

    return Commands(node.transport, path_part(sandbox))


def _listens(target: "Target") -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(target.socket or "")
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            return False
        except OSError:
            return True  # there, and it refuses: the SDK says so by name
    return True


def _start_one() -> None:
    from cloche.cli import local, render

    view = local.start(local.place())
    whose = "for you" if view.mode == "user" else "for all users of this machine"
    render.tick(f"node started {whose} ({local.describe(view)})")
