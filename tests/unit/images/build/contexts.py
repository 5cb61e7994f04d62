"""Trees for tests: files on disk, packed by tar, indexed by the real converter through the daemon's side of it."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import subprocess
import tarfile
import tempfile
from pathlib import Path

from cloche_server.images.build.tree import Tree
from cloche_server.images.worker import Converter
from tests.unit.images.converter import CONVERTER, MKFS


class Worker:
    """One converter process without its walls, which are the keeper's."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [str(CONVERTER), str(MKFS)], stdin=theirs.fileno(), stdout=subprocess.DEVNULL
            )

    def last_words(self) -> str:
        return ""

    async def kill(self) -> int:
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self.channel.close()
        return 0


async def start(*, memory_bytes: int, disk_bytes: int) -> Worker:
    return Worker()


class Packed:
    """A tar in an unlinked file. `tree` is what a build sees of it, as long as this lives."""

    def __init__(self, data: bytes) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the tree
        self._file.write(data)
        self._file.flush()
        self.tree = Tree(())

    async def index(self) -> Packed:
        with tempfile.TemporaryFile() as output:
            entries = await Converter(start).index(self._file.fileno(), output.fileno())
        self.tree = Tree.of(entries, self._file.fileno(), is_context=True)
        return self


async def packed(directory: Path) -> Packed:
    """A directory, as a client sends it."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(directory, arcname=".")
    return await Packed(made.getvalue()).index()


def written(directory: Path, content: dict[str, str]) -> Path:
    """Names with content; `name/` is a directory, `-> target` a link."""
    for name, text in content.items():
        path = directory / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            os.symlink(text.removeprefix("-> "), path)
        else:
            path.write_text(text)
            path.chmod(0o644)
    return directory
