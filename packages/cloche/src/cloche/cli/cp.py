"""`cloche cp`: files and trees into and out of a sandbox.

As `cp -r` does it: a target that is a directory gets the source inside it, else the target becomes the copy. Out of
a sandbox nothing is opened by a path that the guest chose: trees go through the SDK's extractor, below a directory
descriptor; a single file is written under a name of ours beside its target and moved there.
"""

import contextlib
import os
import posixpath
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from cloche.client import Sandbox
    from cloche.wire.files import TreeResult

READ_BYTES: Final = 1024 * 1024
ERRORS_SHOWN_MAX: Final = 20


@dataclass(frozen=True)
class Side:
    """One side of a copy: a path here, or a path in a sandbox."""

    sandbox: str | None
    path: str


def parse_side(text: str) -> Side:
    """`ID:PATH`, else a local path; `./a:b` and `/a:b` are local, as for Docker."""
    head, colon, tail = text.partition(":")
    if colon and head and "/" not in head and not head.startswith("."):
        if not tail.startswith("/"):
            raise click.UsageError(f"{text!r}: give an absolute path inside the sandbox, {head}:/workspace/{tail}")
        return Side(head, tail)
    return Side(None, text)


@click.command("cp")
@click.option("-u", "--user", metavar="USER", help="Read or write inside as this user.")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
def command(user: str | None, source: str, target: str) -> int:
    """Copy files or trees; one of SRC and DST is ID:PATH.

    A DST that is a directory gets the copy inside it, else DST becomes the copy. Links are copied as links; out of
    a sandbox only those that stay inside the copied tree.
    """
    here, there = parse_side(source), parse_side(target)
    if (here.sandbox is None) == (there.sandbox is None):
        raise click.UsageError("one side must be in a sandbox (ID:PATH) and the other here")
    from cloche.cli import session

    with session.connect() as node:
        box = node.connect(here.sandbox or there.sandbox or "")
        if there.sandbox is not None:
            return _into(box, Path(here.path), there.path, user)
        return _out_of(box, here.path, there.path, user)


def _into(box: "Sandbox", source: Path, target: str, user: str | None) -> int:
    source.stat()  # a missing file is our error, before anything is sent
    if target.endswith("/") or _is_directory_inside(box, target, user):
        target = posixpath.join(target, source.resolve().name)
    if source.is_dir():
        from cloche.cli.progress import spinning

        with spinning(f"copying {source}"):
            box.files.mkdir(target, user=user)
            return _report(box.files.upload(source, target, overwrite=True, user=user))
    _send_file(box, source, target, user)
    return 0


def _send_file(box: "Sandbox", source: Path, target: str, user: str | None) -> None:
    from cloche.cli.progress import counting

    status = source.stat()
    with source.open("rb") as file, counting(f"copying {source}", status.st_size) as advance:

        def parts() -> Iterator[bytes]:
            while data := file.read(READ_BYTES):
                advance(len(data))
                yield data

        box.files.write(target, parts(), mode=status.st_mode & 0o777, user=user)


def _is_directory_inside(box: "Sandbox", path: str, user: str | None) -> bool:
    from cloche.wire.errors import ClocheError

    try:
        return box.files.stat(path, user=user).type == "dir"
    except ClocheError as error:
        if error.code in ("path_not_found", "not_a_directory"):
            return False
        raise


def _out_of(box: "Sandbox", source: str, target: str, user: str | None) -> int:
    found = box.files.stat(source, user=user)
    place = Path(target)
    if target.endswith("/") or place.is_dir():
        name = posixpath.basename(source.rstrip("/"))
        place = place / name if name not in ("", ".", "..") else place
    if found.type == "dir":
        from cloche.cli.progress import spinning

        with spinning(f"copying {place}"):
            return _report(box.files.download(source, place, user=user))
    if found.type != "file":
        from cloche.wire.errors import error

        raise error(
            "unsupported", f"{source} is neither a file nor a directory", fix="Copy the directory that holds it."
        )
    _receive_file(box, source, place, found.size, found.mode, user)
    return 0


def _receive_file(box: "Sandbox", source: str, place: Path, size: int, mode: int, user: str | None) -> None:
    """Under a name of ours in the same directory, then moved: a link at the target is replaced, not followed."""
    from cloche.cli.progress import counting

    folder = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    part = f".cloche-{secrets.token_hex(8)}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(part, flags, 0o666 if not mode & 0o111 else 0o777, dir_fd=folder), "wb") as file:
            with counting(f"copying {place}", size) as advance:
                for data in box.files.read_parts(source, user=user):
                    file.write(data)
                    advance(len(data))
        os.rename(part, place.name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=folder)
        os.close(folder)


def _report(result: "TreeResult") -> int:
    """One line for each file that failed; exit code 1 when there was one."""
    from cloche.cli.escape import line
    from cloche.cli.render import say, sign

    for failed in result.errors[:ERRORS_SHOWN_MAX]:
        say(
            f"{sign('✗', 'x', sys.stderr)} {line(failed.code, 40)}: {line(failed.path, 200)}: {line(failed.message, 200)}"
        )
    more = len(result.errors[ERRORS_SHOWN_MAX:]) + result.errors_more
    if more:
        say(f"  and {more} more")
    return 1 if result.errors or result.errors_more else 0
