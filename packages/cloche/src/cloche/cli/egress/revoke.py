"""`cloche egress revoke`: takes a grant back."""

import click


@click.command("revoke")
@click.argument("target", metavar="ID")
@click.argument("grant", metavar="GRANT")
def command(target: str, grant: str) -> int:
    """Take a grant back; connections that it let out are cut. The grants are listed by: cloche egress grants ID"""
    from cloche.cli import session

    with session.connect() as node:
        node.connect(target).egress.revoke(grant)
    return 0
