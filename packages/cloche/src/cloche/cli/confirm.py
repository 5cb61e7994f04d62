"""The one question before something is lost. Without a terminal nothing asks: it fails and names `--yes`."""

import sys

import click

from cloche.cli.render import is_terminal


def confirm(question: str, yes: bool) -> None:
    if yes:
        return
    if not is_terminal(sys.stdin):
        raise click.UsageError(f"{question} There is no terminal to ask on; say --yes")
    click.confirm(question, abort=True, err=True)
