"""`cloche logs`: what a command or a sandbox printed, now or as it comes."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from cloche.cli.carry import write
from cloche.cli.escape import StreamEscaper
from cloche.cli.render import is_terminal

if TYPE_CHECKING:
    from cloche.client import Command, Node

EVENTS_MAX = 1000


@click.command("logs")
@click.option("-f", "--follow", is_flag=True, help="Go on until the end.")
@click.option("--raw", is_flag=True, help="Send terminal escapes to this terminal as they are.")
@click.option("--from", "start", default="0", metavar="CURSOR", help="Begin at this offset.")
@click.option("--events", is_flag=True, help="What the node recorded about it, instead of output.")
@click.option("--json", "as_json", is_flag=True, help="With --events: as JSON.")
@click.argument("target", metavar="ID")
def command(follow: bool, raw: bool, start: str, events: bool, as_json: bool, target: str) -> int:
    """Show what a command or a sandbox printed; also after its end.

    On a terminal, escape sequences are shown and not obeyed, unless --raw says so. When the connection breaks,
    it goes on from where it stopped.
    """
    from cloche.cli import session

    with session.connect() as node:
        if events:
            return _events(node, target, as_json=as_json)
        for one in find(node, target):
            _print(one, start, follow=follow, raw=raw or not is_terminal(sys.stdout))
    return 0


def find(node: "Node", target: str) -> "list[Command]":
    """The command of that id, or all commands of that sandbox, oldest first."""
    from cloche.cli.session import commands_of
    from cloche.wire.errors import ClocheError

    if target.startswith("c"):
        try:
            return [node.find_command(target)]
        except ClocheError as error:
            if error.code != "not_found":
                raise
    return sorted(commands_of(node, target).list(), key=lambda one: one.view.created_at)


def _print(one: "Command", start: str, *, follow: bool, raw: bool) -> None:
    shown = {1: StreamEscaper(), 2: StreamEscaper()}
    show: Callable[[int, bytes], None] = write if raw else lambda fd, data: _write_text(fd, shown[fd].feed(data))
    for chunk in one.output(from_=start, follow=follow):
        show(chunk.fd, chunk.data)
    if not raw:
        for fd, escaper in shown.items():
            _write_text(fd, escaper.feed(b"", final=True))


def _write_text(fd: int, text: str) -> None:
    stream = sys.stderr if fd == 2 else sys.stdout
    stream.write(text)
    stream.flush()


def _events(node: "Node", target: str, *, as_json: bool) -> int:
    import json
    from datetime import UTC, datetime

    from cloche.cli import render
    from cloche.wire.ids import short

    found = node.events(node.connect(target).id, limit=EVENTS_MAX).events
    if as_json:
        render.json_out(found)
        return 0
    rows = [
        (
            datetime.fromtimestamp(event.at, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3],
            event.kind,
            short(event.command) if event.command else "",
            json.dumps(event.detail, ensure_ascii=False) if event.detail else "",
        )
        for event in found
    ]
    render.table(("TIME", "EVENT", "COMMAND", "DETAIL"), rows)
    return 0
