"""`cloche approvals`: what waits for a person, and the answer. Everything that a guest chose is escaped."""

import sys
from typing import TYPE_CHECKING, Final

import click

from cloche.cli.escape import line
from cloche.cli.units import DURATION

if TYPE_CHECKING:
    from cloche.wire.approvals import Approval

COMMAND_CHARS_MAX: Final = 60
HEAD: Final = ("ID", "SANDBOX", "WANTS", "ADDRESS", "AGE", "ENDS IN", "STATE", "ASKED BY")


@click.group("approvals", invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """See and answer what sandboxes ask for. Without a verb: list what waits."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_command)


@command.command("ls")
@click.option("-a", "--all", "include_over", is_flag=True, help="Those that are over too, while they are kept.")
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def list_command(include_over: bool = False, quiet: bool = False, as_json: bool = False) -> int:
    """List what waits."""
    from cloche.cli import render, session
    from cloche.wire.ids import short

    with session.connect() as node:
        found = node.approvals.list(include_over=include_over)
    if as_json:
        render.json_out({"approvals": [each.model_dump(mode="json") for each in found]})
    elif quiet:
        for each in found:
            print(short(each.id))
    else:
        render.table(HEAD, [row(each) for each in found])
    return 0


@command.command("approve")
@click.option(
    "--for",
    "scope_s",
    type=DURATION,
    help="Also the same host and port from this sandbox, this long, where that is allowed.",
)
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
def approve_command(ids: tuple[str, ...], scope_s: float | None) -> int:
    """Let this one action happen."""
    return _answer(ids, approve=True, scope_s=scope_s)


@command.command("deny")
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
def deny_command(ids: tuple[str, ...]) -> int:
    """Refuse this one action."""
    return _answer(ids, approve=False, scope_s=None)


@command.command("watch")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON for each change.")
def watch_command(as_json: bool) -> int:
    """Wait for questions and answer each by a key.

    Without a terminal they are printed as they come. Ctrl-C ends it.
    """
    from cloche.cli import render, watching

    try:
        if not as_json and render.is_terminal(sys.stdin) and render.is_terminal(sys.stdout):
            return watching.at_terminal()
        return watching.in_lines(as_json=as_json)
    except KeyboardInterrupt:
        return 0


def row(each: "Approval") -> tuple[str, ...]:
    from cloche.cli import units
    from cloche.cli.ps import owner_name
    from cloche.wire.ids import short

    ends_in = units.span(each.ends_in_s) if each.state == "waiting" else "-"
    state = each.state.replace("_", " ")
    if each.answered_by:
        state += f" by {owner_name(each.answered_by)}"
    asked_by = line(each.command_line, COMMAND_CHARS_MAX) if each.command_line else "-"
    return (
        short(each.id),
        short(each.sandbox),
        wish(each),
        each.address or "-",
        units.span(each.age_s),
        ends_in,
        state,
        asked_by,
    )


def wish(each: "Approval") -> str:
    """`POST https://hooks.example.com/deploy`, or `hooks.example.com:443` when only the connection is seen."""
    if each.method is None:
        return f"{each.host}:{each.port}"
    origin = {80: f"http://{each.host}", 443: f"https://{each.host}"}.get(each.port, f"{each.host}:{each.port}")
    return f"{each.method} {origin}{each.path or '/'}"


def _answer(ids: tuple[str, ...], *, approve: bool, scope_s: float | None) -> int:
    from cloche.cli import render, session
    from cloche.cli.failure import show_error
    from cloche.wire.errors import ClocheError
    from cloche.wire.ids import short

    code = 0
    with session.connect() as node:
        for each in ids:
            try:
                done = node.approvals.approve(each, scope_s=scope_s) if approve else node.approvals.deny(each)
                render.tick(f"{done.state} {short(done.id)}: {wish(done)} for {short(done.sandbox)}")
            except ClocheError as error:
                code = show_error(error)
    return code
