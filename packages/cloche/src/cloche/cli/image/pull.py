"""`cloche image pull`: an image from its registry."""

import click


@click.command("pull")
@click.option("--platform", metavar="OS/ARCH", help="Of an image for several machines, this one.")
@click.option("--json", "as_json", is_flag=True, help="Print the image's view.")
@click.argument("image", metavar="IMAGE")
def command(image: str, platform: str | None, as_json: bool) -> int:
    """Fetch an image and make it ready to run. Prints its digest.

    Your credentials from docker login or podman login are used if you have some for that registry; nobody else
    sees what was pulled with them. The opposite is: cloche image rm IMAGE
    """
    from cloche.cli import render, session
    from cloche.cli.pulling import showing

    with session.connect(start=True) as node, showing(image, steps=True) as show:
        view = node.images.pull(image, platform=platform, on_event=show)
    if as_json:
        render.json_out(view)
    else:
        print(render.shown(view.digest))
    return 0
