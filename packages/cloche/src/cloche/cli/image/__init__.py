"""`cloche image`: what sandboxes start from. One verb a file.

Words used here:
    image       a root file system with its configuration, by name (`python:3.12-slim`) or by digest
    layer       a part of an image as a registry holds it; the node makes one root file system of all of them
    archive     an image as a file: of `docker save`, or an OCI layout as a tar
    context     the directory that a build may copy from

Names, labels and a build's output were chosen by others: they are shown escaped. Deliberately absent: registries
and Dockerfiles, which only the node reads; logging in (docker's and podman's files are read).
"""

from typing import Final

import click

from cloche.cli.verbs import Table, Verbs

VERBS: Final[Table] = {
    "pull": ("pull", "Fetch an image from its registry."),
    "ls": ("ls", "List images."),
    "inspect": ("inspect", "Show what is known of an image."),
    "build": ("build", "Build an image from a Dockerfile."),
    "import": ("import_", "Take in an image from a file."),
    "export": ("export", "Write an image into a file."),
    "rm": ("rm", "Remove images."),
    "gc": ("gc", "Remove images that nobody uses."),
    "fsck": ("fsck", "Check the whole image store."),
}


@click.group("image", cls=Verbs, table=VERBS, package=__name__)
def command() -> None:
    """Images: pull, build, look at and remove what sandboxes start from."""
