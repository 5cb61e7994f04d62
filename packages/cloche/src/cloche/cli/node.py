"""`cloche node`: the node itself."""

import os
import sys
import time
from pathlib import Path
from typing import Final

import click

from cloche.cli.escape import StreamEscaper
from cloche.cli.render import is_terminal

TAIL_BYTES: Final = 64 * 1024
CHUNK_BYTES: Final = 256 * 1024
LOOK_S: Final = 0.25


@click.group("node")
def command() -> None:
    """Look at the node itself."""


@command.command("show")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def show(as_json: bool) -> int:
    """Show the node that would be asked."""
    from cloche.cli import render, session, units

    with session.connect() as node:
        view = node.info()
    if as_json:
        render.json_out(view)
        return 0
    rows = [
        ("version", view.version),
        ("mode", view.mode),
        ("engines", ", ".join(f"{name} {release}" for name, release in sorted(view.engines.items()))),
        ("accepted", ", ".join(view.accepted) or "nothing weaker"),
        ("cgroup", view.cgroup or "-"),
        ("state", view.state_dir),
        ("daemon", f"pid {view.pid}, number {view.generation}, up {units.span(view.uptime_s)}"),
        ("keeper", f"pid {view.keeper_pid}" if view.keeper_pid else "-"),
        ("sandboxes", f"{view.sandboxes_running} running"),
    ]
    render.table(("NODE", ""), rows)
    return 0


@command.command("logs")
@click.option("-f", "--follow", is_flag=True, help="Go on as it is written.")
@click.option("--all", "everything", is_flag=True, help="From the beginning, not only the last part.")
def logs(follow: bool, everything: bool) -> int:
    """Show the node's own log (as root: the machine's)."""
    from cloche.cli import local
    from cloche.wire.errors import error

    paths = local.log_files(local.place())
    if not paths:
        raise error("not_found", "This node has written no log.", fix="Start it: cloche up")
    escaper = StreamEscaper()
    offsets = {path: 0 if everything else _tail(path) for path in paths}
    try:
        while True:
            for path in paths:
                offsets[path] = _copy(path, offsets[path], escaper)
            if not follow:
                return 0
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        return 0


def _tail(path: Path) -> int:
    """Where the last part begins, at the start of a line."""
    size = path.stat().st_size
    if size <= TAIL_BYTES:
        return 0
    with path.open("rb") as file:
        file.seek(size - TAIL_BYTES)
        return size - TAIL_BYTES + len(file.readline())


def _copy(path: Path, offset: int, escaper: StreamEscaper) -> int:
    """What is new; a file that became shorter was begun anew."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < offset:
                offset = 0
            file.seek(offset)
            while data := file.read(CHUNK_BYTES):
                offset += len(data)
                if is_terminal(sys.stdout):
                    sys.stdout.write(escaper.feed(data))
                else:
                    sys.stdout.buffer.write(data)
    except FileNotFoundError:
        return 0
    sys.stdout.flush()
    return offset
