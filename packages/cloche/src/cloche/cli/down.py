"""`cloche down`: stops the node."""

import click

from cloche.cli.confirm import confirm


@click.command("down")
@click.option(
    "--keep", is_flag=True, help="Stop only the daemon; sandboxes and keeper go on, and cloche up finds them again."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask before ending sandboxes.")
def command(keep: bool, yes: bool) -> int:
    """Stop the node. Ends its sandboxes, and asks before it does.

    With --keep the daemon stops and nothing else: sandboxes go on running, their output waits in their channels
    and a command that prints more than the channel holds waits too, time limits are enforced again from the
    next cloche up, and until then nobody can reach or end them through Cloche.
    """
    from cloche.cli import local, render, units

    place = local.place()
    view = local.running(place)
    if not keep and view is not None and view.sandboxes_running:
        confirm(f"End {units.count(view.sandboxes_running, 'running sandbox')} and stop the node?", yes)
    if not keep and view is None and local.keeper_lives(place):
        confirm("End the sandboxes that were left running, and stop the node?", yes)
    if not local.stop(place, keep=keep):
        render.tick(
            "no node of this machine is running" if place.mode == "machine" else "no node of your own is running"
        )
    elif keep:
        render.tick("the daemon is stopped; sandboxes go on (cloche up finds them again)")
    else:
        render.tick("the node is stopped")
    return 0
