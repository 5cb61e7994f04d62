"""`cloche up`: starts the node, or replaces its daemon."""

from pathlib import Path

import click

from cloche.cli.accept import accept_option


@click.command("up")
@click.option("--replace", is_flag=True, help="Replace a running daemon; sandboxes go on.")
@click.option(
    "--images", type=click.Path(file_okay=False, path_type=Path), help="Directory with prebuilt root file systems."
)
@click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for images that the node pulls and builds.",
)
@accept_option
def command(replace: bool, images: Path | None, store: Path | None, accept: tuple[str, ...]) -> int:
    """Start the node and leave it running.

    As root: the machine's node, for all its users. Else: your own. What the host lacks is an error with its fix;
    --accept names what may be weaker. The opposite is: cloche down
    """
    from cloche.cli import local, render

    place = local.place(images, store)
    if not replace and (view := local.running(place)) is not None:
        render.tick(f"the node is already running ({local.describe(view)})")
        return 0
    view = local.start(place, accept=accept, replace=replace)
    whose = "for all users of this machine" if place.mode == "machine" else "for you"
    render.tick(f"node {'replaced' if replace else 'started'} {whose} ({local.describe(view)})")
    if local.machine_node_comes_first(place):
        render.say(
            f"  This machine has a node for all users, which is asked first; for yours: CLOCHE_URL=unix://{place.socket}"
        )
    return 0
