"""`cloche reset --all`: ends everything and removes all state. Nothing but the installed packages stays."""

import click

from cloche.cli.confirm import confirm
from cloche.cli.escape import line


@click.command("reset")
@click.option("--all", "everything", is_flag=True, help="Really everything; must be said.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def command(everything: bool, yes: bool) -> int:
    """End all sandboxes of this node, stop it, and remove its state directory.

    As root: the machine's node. Else: your own. Output, journal and logs are gone afterwards.
    """
    if not everything:
        raise click.UsageError("say --all: sandboxes, output, journal and logs will be gone")
    from cloche.cli import local, render, units

    place = local.place()
    view = local.running(place)
    running = f"End {units.count(view.sandboxes_running, 'running sandbox')} and remove" if view else "Remove"
    confirm(f"{running} everything in {place.state_dir}?", yes)
    local.stop(place, keep=False)
    store = local.store_elsewhere(place)
    removed = local.remove_state(place)
    render.tick(f"removed {', '.join(removed)}" if removed else "there was nothing")
    if store is not None:
        render.say(
            f"  The image store {line(store, 1000)} is not in the state directory, and stays. It is yours to remove."
        )
    return 0
