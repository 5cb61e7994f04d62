"""`cloche policy explain`: which rule decides about a target."""

import click


@click.command("explain")
@click.option("-X", "--method", metavar="METHOD", help="For a URL: this method (GET).")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.argument("target", metavar="ID")
@click.argument("where", metavar="HOST:PORT|URL")
def command(target: str, where: str, method: str | None, as_json: bool) -> int:
    """Say what a sandbox's policy does with a target, and by which rule. Nothing is resolved or dialled."""
    from cloche.cli import render, session

    with session.connect() as node:
        found = node.connect(target).egress.explain(where, method=method.upper() if method else None)
    if as_json:
        render.json_out(found)
    else:
        for text in found.text.splitlines():
            print(render.shown(text))
    return 0
