"""`cloche run`: one command in a sandbox of its own, which ends with it."""

from typing import TYPE_CHECKING, Any

import click

from cloche.cli import options
from cloche.cli.units import DURATION
from cloche.wire.ids import short

if TYPE_CHECKING:
    from cloche.client import Node
    from cloche.wire.commands import Command as CommandView
    from cloche.wire.sandboxes import CreateSandbox


@click.command("run", cls=options.DashCommand, context_settings={"allow_interspersed_args": False})
@options.terminal_options
@options.command_options
@options.sandbox_options
@options.egress_options
@options.secret_option
@click.option("--timeout", type=DURATION, help="End the command after this long (5m).")
@click.option("--ttl", type=DURATION, help="How long the sandbox may live (its command's time and a minute).")
@click.option(
    "--keep", is_flag=True, help="Leave the sandbox running when the command has ended; end it: cloche kill ID"
)
@click.option("--rm", is_flag=True, hidden=True, expose_value=False, help="Docker's; it is always so.")
@options.image_options
@options.refuse_unsafe
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[IMAGE] [-- CMD...]")
def command(words: tuple[str, ...], **given: Any) -> int:
    """Run a command in a new sandbox, and end the sandbox with it.

    Without CMD it is the image's own; an image's entrypoint goes before CMD, as with Docker. An image that is not
    here is pulled first. stdout, stderr and the exit code are the command's own. Without -i its stdin is closed. The
    first Ctrl-C goes to the command, the second ends the sandbox.
    """
    request = build(words, given)
    from cloche.cli import session

    with session.connect(start=True) as node:
        return perform(node, request, keep=given["keep"], stdin=given["interactive"])


def build(words: tuple[str, ...], given: dict[str, Any]) -> "CreateSandbox":
    """The one request: the sandbox and its command together."""
    from cloche.cli.terminal import local_terminal
    from cloche.wire import defaults

    image, argv = options.image_and_command(words)
    if not argv and image is None:
        raise click.UsageError("which command? cloche run [IMAGE] -- CMD")
    timeout_s = given["timeout"] or defaults.RUN_TIMEOUT_S
    start = options.command_request(argv, {**given, "timeout": timeout_s}, local_terminal() if given["tty"] else None)
    ttl_s = given["ttl"] or min(max(timeout_s + 60, defaults.TTL_S), defaults.TTL_S_MAX)
    request = options.create_request(image, {**given, "ttl": ttl_s}, start)
    return request.model_copy(update={"end_with_command": not given["keep"]})


def perform(node: "Node", request: "CreateSandbox", *, keep: bool, stdin: bool) -> int:
    """Creates, carries, reports; answers the exit code."""
    from cloche.cli.denials import show_denials
    from cloche.cli.failure import show_end
    from cloche.cli.session import create, first_command

    box = create(node, request)
    job = first_command(node, box, request)
    done: CommandView | None
    if job.view.terminal:
        from cloche.cli.terminal import attach

        done = attach(job, stdin=stdin)
        if done is None:
            _tell(f"detached from {short(box.id)}, which goes on; end it: cloche kill {short(box.id)}")
            return 0
    else:
        from cloche.cli.asking import telling
        from cloche.cli.carry import carry

        with telling(box):
            done = carry(job, stdin=stdin, kill=box.kill)
    if keep:
        _tell(f"kept {short(box.id)}; end it: cloche kill {short(box.id)}")
    is_plain = done.ended is not None and done.ended.reason.value == "exited"
    code = show_end(done, None if is_plain else box.info())
    show_denials(done, lives=keep)
    return code


def _tell(text: str) -> None:
    from cloche.cli.render import tick

    tick(text)
