"""`cloche image export`: an image into a file."""

import os
import secrets
import sys
from pathlib import Path

import click


@click.command("export")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="The file to write (stdout without it)."
)
@click.argument("image", metavar="IMAGE")
def command(image: str, output: Path | None) -> int:
    """Write an image as an OCI archive, which docker load, podman load, skopeo and cloche image import read."""
    from cloche.cli import render, session
    from cloche.cli.progress import counting

    if output is None and render.is_terminal(sys.stdout):
        raise click.UsageError("an image is not for a terminal: say -o FILE, or send stdout to a program")
    with session.connect() as node:
        parts = node.images.export_parts(image)
        with counting(f"exporting {render.shown(image)}") as advance:
            if output is None:
                for part in parts:
                    sys.stdout.buffer.write(part)
                    advance(len(part))
                return 0
            size = 0
            fresh = output.with_name(f".cloche-{secrets.token_hex(8)}.part")
            try:
                with open(fresh, "xb") as file:
                    for part in parts:
                        file.write(part)
                        size += len(part)
                        advance(len(part))
                os.rename(fresh, output)
            finally:
                fresh.unlink(missing_ok=True)
    from cloche.cli.units import size as shown_size

    render.tick(f"wrote {output}, {shown_size(size)}")
    return 0
