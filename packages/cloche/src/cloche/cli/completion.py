"""`cloche completion`: the script that teaches a shell our verbs and options."""

import click


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print a completion script. For bash: eval "$(cloche completion bash)" in ~/.bashrc"""
    from click.shell_completion import get_completion_class

    from cloche.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    print(found(cli, {}, "cloche", "_CLOCHE_COMPLETE").source())
    return 0
