"""`cloche prune`: removes what is kept of ended sandboxes."""

import click

from cloche.cli.confirm import confirm


@click.command("prune")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(yes: bool, as_json: bool) -> int:
    """Remove output and end reasons of ended sandboxes. Running ones are not touched."""
    from cloche.cli import render, session, units

    with session.connect() as node:
        ended = node.disk_use().ended_sandboxes
        if ended:
            confirm(f"Remove what is kept of {units.count(ended, 'ended sandbox')}?", yes)
        pruned = node.prune()
    if as_json:
        render.json_out(pruned)
    else:
        render.tick(f"removed {units.count(pruned.sandboxes, 'ended sandbox')}, {units.size(pruned.bytes)}")
    return 0
