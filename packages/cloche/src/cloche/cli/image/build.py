"""`cloche image build`: a Dockerfile's steps, each in a sandbox."""

import os
from pathlib import Path
from typing import Any

import click

from cloche.cli import options
from cloche.cli.units import SIZE


@click.command("build")
@click.option(
    "-f",
    "--file",
    "dockerfile",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The Dockerfile (DIR/Dockerfile).",
)
@click.option("-t", "--tag", "name", metavar="NAME", help="The image's name.")
@click.option(
    "--build-arg", "pairs", multiple=True, metavar="NAME[=VALUE]", help="Set an ARG; without a value, pass yours."
)
@click.option("--target", metavar="STAGE", help="Stop at this stage.")
@click.option("--no-cache", is_flag=True, help="Run every step anew.")
@click.option(
    "--compat",
    is_flag=True,
    help="Build with buildah in one sandbox: knows more instructions (no heredocs), has no cache.",
)
@click.option("-m", "--memory", type=SIZE, help="Memory limit of a step.")
@click.option("--disk", type=SIZE, help="Limit of what a step may write.")
@options.egress_options
@click.option("-q", "--quiet", is_flag=True, help="Only the digest.")
@click.option("--json", "as_json", is_flag=True, help="Print the image's view.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def command(
    directory: Path,
    dockerfile: Path | None,
    name: str | None,
    pairs: tuple[str, ...],
    target: str | None,
    no_cache: bool,
    compat: bool,
    memory: int | None,
    disk: int | None,
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Build an image from the Dockerfile in DIR. Prints its digest.

    Each step runs in a sandbox of its own, never on the host, and reaches only what --allow and --preset name. A step that was built before from the
    same things is taken from there. What .dockerignore names is not sent. The opposite is: cloche image rm NAME
    """
    from cloche.cli import render, session
    from cloche.cli.pulling import building

    with session.connect(start=True) as node, building(quiet=quiet) as show:
        view = node.images.build(
            directory,
            name=name,
            dockerfile=dockerfile,
            args=arguments(pairs),
            target=target,
            no_cache=no_cache,
            compat=compat,
            memory_bytes=memory,
            disk_bytes=disk,
            egress=options.egress_of(given),
            on_event=show,
        )
    if as_json:
        render.json_out(view)
    else:
        print(render.shown(view.digest))
    return 0


def arguments(pairs: tuple[str, ...]) -> dict[str, str]:
    """Docker's rule: a name without a value takes the caller's, or is left out."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name:
            raise click.UsageError(f"--build-arg {pair!r} is not NAME=VALUE")
        if equals:
            found[name] = value
        elif name in os.environ:
            found[name] = os.environ[name]
    return found
