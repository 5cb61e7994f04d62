"""`cloche shell`: a terminal in a sandbox."""

import signal
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from cloche.cli import options
from cloche.cli.units import DURATION

if TYPE_CHECKING:
    from cloche.client import Node

ARGV: Final = ("/bin/sh", "-c", "command -v bash >/dev/null 2>&1 && exec bash; exec sh")
"""The image's bash, or its sh."""
NEW_ONLY: Final = ("name", "memory", "cpus", "disk", "pids", "ttl", "allow", "ask", "presets", "secrets")


@click.command("shell")
@options.command_options
@options.sandbox_options
@options.egress_options
@options.secret_option
@click.option("--image", help="The image of the new sandbox.")
@options.pull_option
@click.option("--ttl", type=DURATION, help="How long the new sandbox may live (24h; it ends with the shell).")
@options.refuse_unsafe
@click.argument("target", required=False, metavar="[ID]")
def command(target: str | None, image: str | None, **given: Any) -> int:
    """Open a shell in a sandbox; without ID in a new one, which ends with the shell.

    Enter, then `~.` leaves the shell running and comes back here; end its sandbox: cloche kill ID
    """
    if target and (image or any(given[name] for name in NEW_ONLY)):
        raise click.UsageError("limits, image, name and egress are for a new sandbox; leave ID out, or leave them out")
    from cloche.cli import session

    with session.connect(start=target is None) as node:
        return _in_existing(node, target, given) if target else _in_new(node, image, given)


def _request(given: dict[str, Any]) -> Any:
    from cloche.cli.terminal import local_terminal

    return options.command_request(list(ARGV), given, local_terminal())


def _in_existing(node: "Node", target: str, given: dict[str, Any]) -> int:
    from cloche.cli.failure import show_end
    from cloche.cli.session import commands_of
    from cloche.cli.terminal import attach

    job = commands_of(node, target).start(**options.start_fields(_request(given)))
    done = attach(job, stdin=True)
    if done is None:
        _say_detached(job.view.sandbox, job.id)
        return 0
    return show_end(done, node.connect(done.sandbox).view)


def _in_new(node: "Node", image: str | None, given: dict[str, Any]) -> int:
    from cloche.cli.failure import show_end
    from cloche.cli.session import create, first_command
    from cloche.cli.terminal import attach
    from cloche.wire import defaults

    ttl_s = given["ttl"] or defaults.TTL_S_MAX
    request = options.create_request(image, {**given, "ttl": ttl_s}, _request(given))
    request = request.model_copy(update={"end_with_command": True, "entrypoint": []})
    box = create(node, request)
    signal.signal(signal.SIGHUP, _hang_up)
    try:
        done = attach(first_command(node, box, request), stdin=True)
    except BaseException:
        box.kill()  # the terminal is gone, or we failed: nobody would find this sandbox again
        raise
    if done is None:
        _say_detached(box.id, box.view.first_command)
        return 0
    return show_end(done, box.info())


def _hang_up(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(129)


def _say_detached(sandbox: str, shell: str | None) -> None:
    from cloche.cli.render import tick
    from cloche.wire.ids import short

    more = f"what it prints: cloche logs -f {short(shell)}; " if shell else ""
    tick(f"the shell in {short(sandbox)} goes on; {more}end it: cloche kill {short(sandbox)}")
