"""`cloche create`: a sandbox that stays until its time is over or it is killed."""

from typing import Any

import click

from cloche.cli import options
from cloche.cli.units import DURATION


@click.command("create", cls=options.DashCommand, context_settings={"allow_interspersed_args": False})
@options.command_options
@options.sandbox_options
@options.egress_options
@options.secret_option
@click.option("--timeout", type=DURATION, help="End the first command after this long.")
@click.option("--ttl", type=DURATION, help="How long the sandbox lives (15m, at most 24h).")
@click.option("--json", "as_json", is_flag=True, help="Print the sandbox's view.")
@options.image_options
@options.refuse_unsafe
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[IMAGE] [-- CMD...]")
def command(words: tuple[str, ...], as_json: bool, **given: Any) -> int:
    """Create a sandbox that stays. Prints its id; with CMD, that command is started in it, after the image's entrypoint.

    The opposite is: cloche kill ID
    """
    from cloche.cli import render, session
    from cloche.wire.ids import short

    image, argv = options.image_and_command(words)
    start = options.command_request(argv, given) if argv or given["entrypoint"] else None
    request = options.create_request(image, given, start)
    if start is None:
        fields = {
            "env": options.environment(given["env"], given["env_file"]),
            "user": given["user"],
            "workdir": given["workdir"],
        }
        request = options.checked(type(request), {**request.model_dump(), **fields})
    with session.connect(start=True) as node:
        box = session.create(node, request).view
    if as_json:
        render.json_out(box)
    else:
        print(short(box.id))
    return 0
