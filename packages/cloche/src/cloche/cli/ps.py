"""`cloche ps`: the caller's sandboxes."""

import os
from typing import TYPE_CHECKING

import click

from cloche.cli import units

if TYPE_CHECKING:
    from cloche.wire.sandboxes import Sandbox

HEAD = ("ID", "IMAGE", "CLASS", "STATE", "CPU", "MEM", "AGE", "ENDS IN", "OWNER")


def rows(boxes: "list[Sandbox]") -> list[tuple[str, ...]]:
    """One row a sandbox; a NAME stands behind the id as `id (name)`."""
    return [_row(box) for box in boxes]


def _row(box: "Sandbox") -> tuple[str, ...]:
    from cloche.wire.ids import short

    limit = units.megabytes(box.limits.memory_bytes)
    used = f"{units.megabytes(box.usage.memory_bytes)}/" if box.usage and not box.ended else ""
    cpu = f"{box.usage.cpu_percent:.0f} %" if box.usage and box.usage.cpu_percent is not None and not box.ended else "-"
    return (
        f"{short(box.id)} ({box.name})" if box.name else short(box.id),
        box.image,
        box.isolation.isolation_class if box.isolation else "-",
        _state(box),
        cpu,
        f"{used}{limit} MB",
        units.span(box.age_s),
        units.span(box.ends_in_s),
        owner_name(box.owner),
    )


def _state(box: "Sandbox") -> str:
    """`running`, or for an ended one how it ended: `exited 1`, `killed by ttl`."""
    if box.ended is None:
        return box.state.value
    end = box.ended
    if end.exit_code is not None:
        return f"{end.reason.value} {end.exit_code}"
    return f"{end.reason.value} by {owner_name(end.by)}" if end.by else end.reason.value


def owner_name(owner: str) -> str:
    """`me` for the caller, a user's name for another, else what the node says."""
    if owner == f"uid:{os.getuid()}":
        return "me"
    if owner.startswith("uid:") and owner[4:].isdigit():
        import pwd

        try:
            return pwd.getpwuid(int(owner[4:])).pw_name
        except KeyError:
            return owner
    return owner


@click.command("ps")
@click.option("-a", "--all", "include_ended", is_flag=True, help="Ended ones too, as long as they are kept.")
@click.option("-q", "--quiet", is_flag=True, help="Only ids.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(include_ended: bool, quiet: bool, as_json: bool) -> int:
    """List your sandboxes."""
    from cloche.cli import render, session
    from cloche.wire.ids import short

    with session.connect() as node:
        boxes = [box.view for box in node.list(include_ended=include_ended, usage=not quiet)]
    if as_json:
        render.json_out({"sandboxes": [box.model_dump(mode="json", by_alias=True) for box in boxes]})
    elif quiet:
        for box in boxes:
            print(short(box.id))
    else:
        render.table(HEAD, rows(boxes))
    return 0
