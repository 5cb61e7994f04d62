"""`cloche delegate`: gives a user a cgroup, so that his own node can set limits."""

import os

import click


@click.command("delegate")
@click.option("--remove", is_flag=True, help="Take it away again.")
@click.argument("user")
def command(user: str, remove: bool) -> int:
    """Let USER run a node of his own with limits. Needs root, once. The opposite is --remove."""
    from cloche.cli import local, render
    from cloche.wire.errors import error

    if os.geteuid() != 0:
        fix = f"Type: sudo {local.command_for_root()} delegate {user}"
        raise error("forbidden", "Only root can delegate a cgroup.", fix=fix)
    done = local.delegate(user, remove=remove)
    render.tick(done)
    return 0
