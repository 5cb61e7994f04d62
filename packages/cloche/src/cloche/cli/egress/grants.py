"""`cloche egress grants`: what was granted to a running sandbox and still holds."""

import click


@click.command("grants")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.argument("target", metavar="ID")
def command(target: str, as_json: bool) -> int:
    """List what was granted to a running sandbox and still holds."""
    from cloche.cli import render, session, units

    with session.connect() as node:
        found = node.connect(target).egress.grants()
    if as_json:
        render.json_out(found)
        return 0
    rows = [
        (each.id, each.rule.effect, each.rule.host or f"preset:{each.rule.preset}", units.span(each.ends_in_s))
        for each in found
    ]
    render.table(("GRANT", "EFFECT", "HOST", "ENDS IN"), rows)
    return 0
