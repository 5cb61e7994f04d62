"""`cloche egress`: what a sandbox tried to reach, and letting it out a little more while it runs. One verb a file.

Words used here:
    record      one attempt to get out: what was decided, by which rule, and what came of it
    grant       a rule added to a running sandbox for a while

Names and paths in records were chosen by a guest: they are shown escaped. Deliberately absent: deciding, which only the node
does; anything that something inside a sandbox could call.
"""

from typing import Any, Final

import click

from cloche.cli.verbs import Table, Verbs

VERBS: Final[Table] = {
    "show": ("show", "Show what a sandbox tried to reach (also: cloche egress ID)."),
    "allow": ("allow", "Let a running sandbox reach one more host, for a while."),
    "grants": ("grants", "List what was granted and still holds."),
    "revoke": ("revoke", "Take a grant back."),
}


class _ShowFirst(Verbs):
    """`cloche egress ID -f` is `cloche egress show ID -f`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.table, "-h", "--help"):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group("egress", cls=_ShowFirst, table=VERBS, package=__name__)
def command(**_given: Any) -> None:
    """The way out: what a sandbox tried to reach, and letting it out a little more.

    cloche egress ID shows every attempt; cloche egress allow ID HOST lets it reach one more host for ten minutes.
    """
