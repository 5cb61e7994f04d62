"""`cloche df`: what the node keeps on disk."""

import click


@click.command("df")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(as_json: bool) -> int:
    """Show what the node keeps on disk."""
    from cloche.cli import render, session, units

    with session.connect() as node:
        use = node.disk_use()
    if as_json:
        render.json_out(use)
        return 0
    rows = [
        ("images", units.size(use.images_bytes), "root file systems, shared and read-only"),
        ("layers", units.size(use.layers_bytes), "what running sandboxes have written"),
        (
            "logs",
            units.size(use.logs_bytes),
            f"output, also of {units.count(use.ended_sandboxes, 'ended sandbox')} (cloche prune)",
        ),
        ("journal", units.size(use.journal_bytes), "the record of what was decided"),
        ("free", units.size(use.free_bytes), ""),
    ]
    render.table(("WHAT", "SIZE", "NOTE"), rows)
    return 0
