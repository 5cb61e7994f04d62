"""`cloche image rm`: images go."""

import click


@click.command("rm")
@click.argument("images", nargs=-1, required=True, metavar="IMAGE...")
def command(images: tuple[str, ...]) -> int:
    """Remove images by name; by digest, with all their names. Prints what was removed.

    What no other image needs leaves the disk with the next cloche image gc.
    """
    from cloche.cli import session
    from cloche.cli.escape import line
    from cloche.cli.failure import show_error
    from cloche.wire.errors import ClocheError

    code = 0
    with session.connect() as node:
        for image in images:
            try:
                node.images.remove(image)
                print(line(image, 512))
            except ClocheError as error:
                code = show_error(error)
    return code
