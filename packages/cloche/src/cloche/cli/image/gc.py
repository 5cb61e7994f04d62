"""`cloche image gc`: the store gives back what nobody uses."""

import click

from cloche.cli.units import DURATION, SIZE


@click.command("gc")
@click.option("--max-size", "max_bytes", type=SIZE, help="Remove the least used until the store has at most this.")
@click.option("--older-than", "max_age_s", type=DURATION, help="Remove what was not used for this long.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(max_bytes: int | None, max_age_s: float | None, as_json: bool) -> int:
    """Remove what no image needs; with options, images too. What a sandbox runs from stays. For the administrator."""
    from cloche.cli import render, session, units
    from cloche.cli.progress import spinning

    with session.connect() as node, spinning("collecting"):
        result = node.images.gc(max_bytes=max_bytes, max_age_s=max_age_s)
    if as_json:
        render.json_out(result)
        return 0
    for image in result.images:
        print(render.shown(image))
    images = units.count(len(result.images), "image", "images")
    parts = units.count(result.blobs, "layer or manifest", "layers and manifests")
    roots = units.count(result.roots, "root file system", "root file systems")
    render.tick(f"removed {images}, {parts}, {roots}: {units.size(result.bytes)}")
    return 0
