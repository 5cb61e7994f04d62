"""`cloche image inspect`: one image, whole."""

import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from cloche.wire.images import ImageView


@click.command("inspect")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.argument("image", metavar="IMAGE")
def command(image: str, as_json: bool) -> int:
    """Show an image's names, sizes, configuration, signatures, and what of it a sandbox cannot have."""
    from cloche.cli import render, session

    with session.connect() as node:
        view = node.images.inspect(image)
    if as_json:
        render.json_out(view)
    else:
        render.table(("IMAGE", ""), rows(view))
    return 0


def rows(view: "ImageView") -> list[tuple[str, str]]:
    from cloche.cli import units

    config, lost = view.config, view.lost
    found = [
        ("names", ", ".join(view.names) or "-"),
        ("digest", view.digest),
        ("platform", view.platform),
        ("source", f"{view.source}, only for you" if view.private else view.source),
        ("created", view.created or "-"),
        ("here since", datetime.fromtimestamp(view.added_at, UTC).astimezone().isoformat(" ", "seconds")),
        ("layers", f"{view.layers}, {units.size(view.size_bytes)} compressed"),
        ("root", f"{units.size(view.root_bytes)}, {view.entries} entries"),
        ("in use", f"by {units.count(view.in_use, 'sandbox')}" if view.in_use else "no"),
        ("signed by", ", ".join(view.signed_by) or "-"),
        ("entrypoint", shlex.join(config.entrypoint) or "-"),
        ("cmd", shlex.join(config.cmd) or "-"),
        ("user", config.user or "root"),
        ("workdir", config.workdir or "/"),
    ]
    found += [("env", f"{name}={value}") for name, value in config.env.items()]
    found += [("label", f"{name}={value}") for name, value in config.labels.items()]
    for what, count in (("extended attributes", lost.xattrs), ("sockets", lost.sockets), ("devices", lost.devices)):
        if count:
            found.append(("lost", f"{count} {what}"))
    return found + [("lost", example) for example in lost.xattr_examples]
