"""`cloche doctor`: what this host gives and lacks, each with the command that fixes it."""

import io
import json
import os
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, Final

import click

from cloche.cli import render
from cloche.cli.escape import line

MARKS: Final = {"ok": ("✓", "+", "32"), "weaker": ("!", "!", "33"), "missing": ("✗", "x", "31")}
BUNDLE_LOG_BYTES: Final = 1024 * 1024


@click.command("doctor")
@click.option("--strict", is_flag=True, help="Fail also when something is only weaker than it should be.")
@click.option(
    "--bundle",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all of it, and the node's log, into a tar.gz.",
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(strict: bool, bundle: Path | None, as_json: bool) -> int:
    """Check what this host gives and what it lacks.

    Exit code 0 when a node can run here, 1 when not; with --strict also 1 when it would be weaker than it should.
    """
    from cloche.cli import local

    found = local.checks()
    if as_json:
        render.json_out({"checks": found})
    else:
        _show(found)
    if bundle is not None:
        _write_bundle(bundle, found)
        render.tick(f"wrote {bundle}; look into it before you send it")
    return exit_code(found, strict)


def exit_code(found: list[dict[str, Any]], strict: bool) -> int:
    bad = {"missing", "weaker"} if strict else {"missing"}
    return 1 if any(check["state"] in bad for check in found) else 0


def _show(found: list[dict[str, Any]]) -> None:
    wide = max((len(check["name"]) for check in found), default=0)
    for check in found:
        char, plain, colour = MARKS.get(check["state"], MARKS["missing"])
        mark = render.styled(render.sign(char, plain, sys.stdout), colour, sys.stdout)
        print(f"{mark} {line(check['name'], 40):<{wide}}  {line(check['text'], 200)}")
        if check.get("fix"):
            print(f"  {'':<{wide}}  {line(check['fix'], 300)}")


def _write_bundle(path: Path, found: list[dict[str, Any]]) -> None:
    """Checks, versions, the node's view and the last part of its log; no environment, no output of sandboxes."""
    from cloche.cli import local
    from cloche.cli.version import version

    parts = {"checks.json": json.dumps(found, indent=2).encode(), "version.txt": version().encode()}
    place = local.place()
    view = local.running(place)
    if view is not None:
        parts["node.json"] = view.model_dump_json(indent=2).encode()
    for log in local.log_files(place):
        parts[f"log/{log.name}"] = log.read_bytes()[-BUNDLE_LOG_BYTES:]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)  # also when the file was there
    with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, data in parts.items():
            entry = tarfile.TarInfo(f"cloche-doctor/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
            tar.addfile(entry, io.BytesIO(data))
