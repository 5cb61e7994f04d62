"""What an import or a build sends: an archive as it is, a layout or a context packed on the way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cloche.client._ignore import Ignore
from cloche.client._pack import BLOCK, Packer
from cloche.client._results import escaped
from cloche.wire.errors import ClocheError, error
from cloche.wire.files import FileError

READ_BYTES: Final = 1024 * 1024
OUTSIDE_NAME: Final = ".cloche-dockerfile"
"""How a Dockerfile that is not in the context is called in what is sent."""


def archive_parts(source: Path) -> Iterator[bytes]:
    """A file's bytes, or a directory as a tar."""
    if source.is_dir():
        if not (source / "oci-layout").is_file():
            raise error(
                "invalid_request",
                f"{escaped(str(source))} is a directory without an OCI layout.",
                fix="Name a file of docker save, an OCI archive, or a directory with an oci-layout file.",
            )
        yield from Packer(source).blocks()
        return
    try:
        with source.open("rb") as file:
            while part := file.read(READ_BYTES):
                yield part
    except OSError as raised:
        raise _unreadable(source, raised) from None


class BuildContext:
    """A directory and a Dockerfile, as one tar. After `blocks()`, `errors` has what could not be sent."""

    def __init__(self, directory: Path, dockerfile: Path | None) -> None:
        if not directory.is_dir():
            raise error(
                "invalid_request", f"{escaped(str(directory))} is not a directory.", fix="Name the context's directory."
            )
        self.dockerfile, self._outside = _named(directory, dockerfile)
        inside = None if self._outside else self.dockerfile
        self._packer = Packer(directory, skips=Ignore.of(directory, inside).skips)

    @property
    def errors(self) -> list[FileError]:
        return self._packer.errors

    def blocks(self) -> Iterator[bytes]:
        if self._outside is not None:
            blocks = list(Packer(self._outside, name=OUTSIDE_NAME).blocks())
            yield b"".join(blocks)[: -2 * BLOCK]
        yield from self._packer.blocks()


def _named(directory: Path, dockerfile: Path | None) -> tuple[str, Path | None]:
    """Its name in what is sent, and where it is when not in the context. As docker does: a given path is from here."""
    if dockerfile is None:
        for name in ("Dockerfile", "Containerfile"):
            if (directory / name).is_file():
                return name, None
        raise error(
            "path_not_found",
            f"There is no Dockerfile in {escaped(str(directory))}.",
            fix="Make one, or name it: cloche image build -f FILE DIR",
        )
    for found in (dockerfile, directory / dockerfile):
        if found.is_file():
            break
    else:
        raise _unreadable(dockerfile, FileNotFoundError(2, os.strerror(2)))
    try:
        return found.resolve().relative_to(directory.resolve()).as_posix(), None
    except ValueError:
        return OUTSIDE_NAME, found


def _unreadable(path: Path, raised: OSError) -> ClocheError:
    return error(
        "path_not_found",
        f"{escaped(str(path))} can't be read: {raised.strerror}.",
        fix="Name a file or directory of yours.",
    )
