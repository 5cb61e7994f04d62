"""`cloche image ls`: the images that the caller may use."""

import time
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from cloche.wire.images import ImageView

HEAD: Final = ("IMAGE", "DIGEST", "PLATFORM", "SIZE", "ROOT", "USED", "SOURCE")
DIGEST_CHARS: Final = 19
"""`sha256:` and twelve more, which `rm` and `inspect` take."""


@click.command("ls")
@click.option("-q", "--quiet", is_flag=True, help="Only digests.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(quiet: bool, as_json: bool) -> int:
    """List the images on the node that you may use."""
    from cloche.cli import render, session
    from cloche.cli.escape import line

    with session.connect() as node:
        views = node.images.list()
    if as_json:
        render.json_out({"images": [view.model_dump(mode="json") for view in views]})
    elif quiet:
        for view in views:
            print(line(view.digest))
    else:
        render.table(HEAD, [row for view in views for row in rows(view)])
    return 0


def rows(view: "ImageView") -> list[tuple[str, ...]]:
    """One row a name, as docker has it."""
    from cloche.cli import units

    used = f"{view.in_use} running" if view.in_use else f"{units.span(time.time() - view.used_at)} ago"
    source = f"{view.source}, private" if view.private else view.source
    rest = (view.digest[:DIGEST_CHARS], view.platform, units.size(view.size_bytes), units.size(view.root_bytes))
    return [(name, *rest, used, source) for name in view.names or ["-"]]
