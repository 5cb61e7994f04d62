"""`cloche kill`: ends sandboxes, and everything of them."""

import click


@click.command("kill")
@click.option("--all", "everything", is_flag=True, help="All of yours.")
@click.argument("targets", nargs=-1, metavar="[ID]...")
def command(everything: bool, targets: tuple[str, ...]) -> int:
    """End sandboxes by id or name. Their output is kept for a day: cloche logs ID"""
    if everything == bool(targets):
        raise click.UsageError("give ids or names, or --all")
    from cloche.cli import render, session, units
    from cloche.cli.failure import show_error
    from cloche.wire.errors import ClocheError
    from cloche.wire.ids import short

    code = 0
    with session.connect() as node:
        if everything:
            render.tick(f"ended {units.count(node.kill_all(), 'sandbox')}")
            return 0
        for target in targets:
            try:
                print(short(node.connect(target).kill().id))
            except ClocheError as error:
                code = show_error(error)
    return code
