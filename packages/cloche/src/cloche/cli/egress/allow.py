"""`cloche egress allow`: one more host for a running sandbox, for a while."""

import click

from cloche.cli.units import DURATION


@click.command("allow")
@click.option("--for", "for_s", type=DURATION, default="10m", show_default=True, help="How long (at most 24h).")
@click.option("--ask", is_flag=True, help="Let each connection wait for a person instead.")
@click.argument("target", metavar="ID")
@click.argument("host", metavar="HOST[:PORT]")
def command(target: str, host: str, for_s: float, ask: bool) -> int:
    """Let a running sandbox reach one more host, for a while. HOST can be preset:NAME. Prints the grant's id.

    The organisation's denials still hold. The opposite is: cloche egress revoke ID GRANT
    """
    from cloche.cli import render, session, units

    with session.connect() as node:
        view = node.connect(target).egress.grant(f"ask:{host}" if ask else host, for_s=for_s)
    render.say(f"{render.shown(host)} for {units.words(view.ends_in_s)}")
    print(render.shown(view.id))
    return 0
