"""`cloche exec`: a command in a sandbox that is already there."""

from typing import Any

import click

from cloche.cli import options
from cloche.cli.units import DURATION


@click.command("exec", cls=options.DashCommand, context_settings={"allow_interspersed_args": False})
@options.terminal_options
@options.command_options
@click.option("--timeout", type=DURATION, help="End the command after this long.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="ID -- CMD...")
def command(words: tuple[str, ...], **given: Any) -> int:
    """Run a command in a sandbox. stdout, stderr and the exit code are the command's own."""
    target, argv = options.target_and_command(words)
    from cloche.cli import session
    from cloche.cli.denials import show_denials
    from cloche.cli.failure import show_end
    from cloche.cli.terminal import attach, local_terminal

    request = options.command_request(argv, given, local_terminal() if given["tty"] else None)
    with session.connect() as node:
        job = session.commands_of(node, target).start(**options.start_fields(request))
        if given["tty"]:
            done = attach(job, stdin=given["interactive"])
            if done is None:
                return 0
        else:
            from cloche.cli.carry import carry

            done = carry(job, stdin=given["interactive"], kill=job.kill)
        is_plain = done.ended is not None and done.ended.reason.value == "exited"
        code = show_end(done, None if is_plain else node.connect(done.sandbox).view)
        show_denials(done, lives=True)
        return code
