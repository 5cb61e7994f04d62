"""`cloche image import`: an image from a file."""

from pathlib import Path

import click


@click.command("import")
@click.option("-t", "--tag", "name", metavar="NAME", help="Call it so, not as the archive does.")
@click.option("--json", "as_json", is_flag=True, help="Print the images' views.")
@click.argument("path", metavar="PATH", type=click.Path(exists=True, path_type=Path))
def command(path: Path, name: str | None, as_json: bool) -> int:
    """Take in an image: a tar of docker save, an OCI archive, or a directory with an OCI layout. Prints digests.

    The opposite is: cloche image rm NAME
    """
    from cloche.cli import render, session
    from cloche.cli.pulling import showing

    with session.connect(start=True) as node, showing(str(path), steps=True) as show:
        views = node.images.import_archive(path, name=name, on_event=show)
    if as_json:
        render.json_out({"images": [view.model_dump(mode="json") for view in views]})
        return 0
    for view in views:
        print(render.shown(view.digest))
    return 0
