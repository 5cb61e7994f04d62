"""`cloche policy`: what the rules say of a target, before anything tries it. One verb a file.

Words used here:
    target      a host and a port, or a URL
    rule        what decided, by its id; `default` when none did

Deliberately absent: rules and their order, which only the node knows; changing them (`cloche egress allow`, policy.yaml).
"""

from typing import Final

import click

from cloche.cli.verbs import Table, Verbs

VERBS: Final[Table] = {"explain": ("explain", "Say which rule decides about a target, and how.")}


@click.group("policy", cls=Verbs, table=VERBS, package=__name__)
def command() -> None:
    """What a sandbox may reach, and by which rule."""
