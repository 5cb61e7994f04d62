"""A group of verbs whose modules are imported when one is typed and not before."""

import importlib
from typing import Any

import click

Table = dict[str, tuple[str, str]]
"""Verb → its module, and its line in the listing."""


class Verbs(click.Group):
    """Loaded one by one: `cloche --version` must not pay for HTTP and models."""

    def __init__(self, *args: Any, table: Table, package: str, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.table = table
        self._package = package

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.table:
            return None
        command = importlib.import_module(f"{self._package}.{self.table[cmd_name][0]}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_module, text) in self.table.items()])
