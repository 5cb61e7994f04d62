"""The real converter without the keeper's walls: enough for tests of what the node does with its answers."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import tempfile

import cloche_engine

BINARIES = cloche_engine.agent_path().parent
PROGRAM = BINARIES / f"cloche-convert-{platform.machine()}"
MKFS = BINARIES / "mkfs.erofs"


def can_convert() -> bool:
    return PROGRAM.is_file() and MKFS.is_file()


class LocalWorker:
    """`images.worker.Started`."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by kill
        self._process = subprocess.Popen([PROGRAM, MKFS], stdin=theirs, stdout=subprocess.DEVNULL, stderr=self._log)
        theirs.close()

    def last_words(self) -> str:
        return os.pread(self._log.fileno(), 65536, 0).decode(errors="replace")

    async def kill(self) -> int:
        self._process.kill()
        self._process.wait()
        self.channel.close()
        self._log.close()
        return 0


async def start(*, memory_bytes: int, disk_bytes: int) -> LocalWorker:
    """`images.worker.Starter`."""
    return LocalWorker()
