"""`cloche version`: ours, and the node's that would be asked."""

import click


def version() -> str:
    from cloche import __version__

    return __version__


def version_line() -> str:
    return f"cloche {version()}"


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(as_json: bool) -> int:
    """Show versions: this client's, and the node's with its engines if one answers."""
    from cloche.cli import render, session
    from cloche.wire.errors import ClocheError

    node_view = None
    try:
        with session.connect() as node:
            node_view = node.info()
    except ClocheError as error:
        if error.code not in ("node_unavailable", "node_refused"):
            raise
    if as_json:
        render.json_out({"cloche": version(), "node": node_view.model_dump(mode="json") if node_view else None})
        return 0
    print(version_line())
    if node_view is None:
        print("no node answers here (cloche up starts one)")
    else:
        engines = ", ".join(f"{name} {release}" for name, release in sorted(node_view.engines.items()))
        print(f"node {node_view.version} ({node_view.mode}), engines: {engines or 'none'}")
    return 0
