"""`cloche egress ID`: every attempt to get out, allowed or not."""

import sys
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from cloche.wire.egress import EgressRecord

USUAL: Final = frozenset({"allowed", "closed", "guest_gone"})
"""How an allowed connection goes: either side closes it."""
HEAD: Final = ("TIME", "COMMAND", "VERDICT", "TARGET", "RULE", "WHAT")


@click.command("show")
@click.option("-f", "--follow", is_flag=True, help="Go on until the sandbox ends.")
@click.option("--denied", is_flag=True, help="Only what was refused.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.argument("target", metavar="ID")
def command(target: str, follow: bool, denied: bool, as_json: bool) -> int:
    """Show what a sandbox tried to reach; also after its end."""
    from cloche.cli import render, session

    with session.connect() as node:
        egress = node.connect(target).egress
        records = egress.follow() if follow else iter(egress.records())
        wanted = (each for each in records if not denied or each.verdict in ("denied", "alert"))
        if as_json:
            for record in wanted:
                _print_json(record)
        elif follow:
            for record in wanted:
                print("  ".join(part for part in render.table_lines(HEAD, [row(record)])[1:]), flush=True)
        else:
            render.table(HEAD, [row(each) for each in wanted])
    return 0


def row(record: "EgressRecord") -> tuple[str, ...]:
    """Cells; the table escapes them."""
    from datetime import UTC, datetime

    from cloche.wire.ids import short

    at = datetime.fromtimestamp(record.at, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
    return (
        at,
        short(record.command) if record.command else "-",
        record.verdict,
        f"{record.host}:{record.port}",
        record.rule,
        what(record),
    )


def what(record: "EgressRecord") -> str:
    """The rest of a record in a few words."""
    from cloche.cli import units

    parts = [] if record.code in USUAL else [record.code]
    if record.method:
        parts.append(f"{record.method} {record.path or ''}".rstrip())
    if record.address:
        parts.append(record.address)
    if record.bytes_up is not None or record.bytes_down is not None:
        parts.append(f"{units.size(record.bytes_up or 0)} up, {units.size(record.bytes_down or 0)} down")
    if record.duration_s is not None:
        parts.append(f"{record.duration_s:.1f} s")
    if record.verdict == "alert" and record.text:
        parts.append(record.text)
    return " ".join(parts)


def _print_json(record: "EgressRecord") -> None:
    import json

    sys.stdout.write(json.dumps(record.model_dump(mode="json", exclude_none=True)) + "\n")
    sys.stdout.flush()
