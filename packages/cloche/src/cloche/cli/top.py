"""`cloche top`: the table of `ps`, live. Without a terminal: once."""

import sys
import time
from typing import TYPE_CHECKING

import click

from cloche.cli import render
from cloche.cli.ps import HEAD, rows

if TYPE_CHECKING:
    from rich.table import Table

    from cloche.wire.sandboxes import Sandbox


@click.command("top")
@click.option(
    "--interval", type=click.FloatRange(min=0.2), default=1.0, show_default=True, help="Seconds between two looks."
)
@click.option("--json", "as_json", is_flag=True, help="Once, as JSON.")
def command(interval: float, as_json: bool) -> int:
    """Watch your sandboxes, the busiest first. Ctrl-C ends it."""
    from cloche.cli import session

    with session.connect() as node:
        if as_json:
            boxes = order([box.view for box in node.list(usage=True)])
            render.json_out({"sandboxes": [box.model_dump(mode="json", by_alias=True) for box in boxes]})
            return 0
        if not render.is_terminal(sys.stdout):
            render.table(HEAD, rows(order([box.view for box in node.list(usage=True)])))
            return 0
        from rich.console import Console
        from rich.live import Live

        try:
            with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
                while True:
                    live.update(_table(order([box.view for box in node.list(usage=True)])), refresh=True)
                    time.sleep(interval)
        except KeyboardInterrupt:
            return 0


def order(boxes: "list[Sandbox]") -> "list[Sandbox]":
    """By CPU, then by memory, the highest first."""

    def load(box: "Sandbox") -> tuple[float, int]:
        return (box.usage.cpu_percent or 0.0, box.usage.memory_bytes) if box.usage else (0.0, 0)

    return sorted(boxes, key=load, reverse=True)


def _table(boxes: "list[Sandbox]") -> "Table":
    from rich.table import Table
    from rich.text import Text

    from cloche.cli.escape import line

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in HEAD:
        table.add_column(name, no_wrap=True)
    for row in rows(boxes):
        table.add_row(*(Text(line(cell, render.CELL_WIDTH_MAX)) for cell in row))
    return table
