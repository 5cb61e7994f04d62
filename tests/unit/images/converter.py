"""Starts the real cloche-convert with descriptors of our own, and with a limit on its memory.

No keeper and no other uid here: what the process may touch is a matter of other tests. This is
about what it makes of the bytes it is given.
"""

from __future__ import annotations

import array
import functools
import gzip
import hashlib
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).parents[3]
BIN = ROOT / "packages/cloche-engine/src/cloche_engine/bin"
CONVERTER = BIN / f"cloche-convert-{platform.machine()}"
MKFS = BIN / "mkfs.erofs"
MESSAGE_BYTES_MAX = 64 << 10
OUTPUT_LOG_BYTES_MAX = 64 << 10
MEMORY_BYTES_MAX = 448 << 20

LIMITS: dict[str, int] = {
    "raw_bytes": 1 << 30,
    "entries": 100_000,
    "depth": 128,
    "name_bytes": 255,
    "path_bytes": 4096,
    "header_bytes": 1 << 20,
    "ratio": 1000,
    "seconds": 60,
}


@dataclass(frozen=True)
class Layer:
    """A blob as a manifest names it; the words may lie."""

    blob: Path
    compression: str
    size: int
    digest: str
    diff_id: str


@dataclass
class Ended:
    """What one run answered."""

    done: dict[str, Any] | None
    refused: dict[str, Any] | None
    progress: list[dict[str, int]] = field(default_factory=list)
    status: int = 0
    log: str = ""

    @property
    def code(self) -> str | None:
        return None if self.refused is None else self.refused["code"]


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as opened:
        return "sha256:" + hashlib.file_digest(opened, "sha256").hexdigest()


def layer(directory: Path, raw: bytes, *, compression: str = "gzip", packed: bytes | None = None) -> Layer:
    """An honest layer of these raw bytes."""
    if packed is None:
        packed = gzip.compress(raw, 1, mtime=0) if compression == "gzip" else raw
    descriptor, name = tempfile.mkstemp(dir=directory, prefix="layer-")
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(packed)
    return Layer(Path(name), compression, len(packed), digest(packed), digest(raw))


def _send(channel: socket.socket, job: dict[str, Any], descriptors: Sequence[int]) -> None:
    body = json.dumps(job).encode()
    message = struct.pack("<I", len(body)) + body
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    sent = channel.sendmsg([message], [rights])
    if sent < len(message):  # else the worker may have answered and gone
        channel.sendall(message[sent:])


def _messages(stream: BinaryIO) -> Iterable[dict[str, Any]]:
    while head := stream.read(4):
        (length,) = struct.unpack("<I", head)
        assert length <= MESSAGE_BYTES_MAX, "the worker sent a message that is too long"
        message = json.loads(stream.read(length))
        assert isinstance(message, dict)
        yield message


def run(
    job: dict[str, Any],
    descriptors: Sequence[int],
    *,
    planted: str | None = None,
    file_bytes_max: int | None = None,
    memory_bytes_max: int = MEMORY_BYTES_MAX,
    program: Path = CONVERTER,
    mkfs: Path = MKFS,
    prefix: Sequence[str] = (),
    cwd: Path = Path("/"),
    timeout_s: float = 100,
) -> Ended:
    """One job to its end. Beyond its memory the worker and mkfs.erofs, each, get none, and die of it."""
    ours, theirs = socket.socketpair()
    prlimit = shutil.which("prlimit")
    assert prlimit, "prlimit is of util-linux"
    limit = [prlimit, f"--as={memory_bytes_max}"]
    if file_bytes_max is not None:
        limit.append(f"--fsize={file_bytes_max}")
    environment = {} if planted is None else {"CLOCHE_CONVERT_PLANTED": planted}

    with ours, tempfile.TemporaryFile() as log:
        with theirs:
            process = subprocess.Popen(
                [*prefix, *limit, str(program), str(mkfs)],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=environment,
                cwd=cwd,
            )
        killer = threading.Timer(timeout_s, process.kill)
        killer.start()
        try:
            _send(ours, job, descriptors)
            ended = Ended(None, None)
            with ours.makefile("rb") as stream:
                for message in _messages(stream):
                    (kind,) = message
                    if kind == "progress":
                        ended.progress.append(message[kind])
                        continue
                    assert (ended.done, ended.refused) == (None, None), "two answers"
                    setattr(ended, kind, message[kind])
        finally:
            killer.cancel()
        ended.status = process.wait()
        log.seek(0)
        ended.log = log.read(OUTPUT_LOG_BYTES_MAX).decode(errors="replace")
    return ended


def image(
    layers: Sequence[Layer],
    output: BinaryIO,
    scratch: BinaryIO,
    *,
    limits: dict[str, int] | None = None,
    agent: Path | None = None,
    **options: Any,
) -> Ended:
    """The job `image`; with an agent, the root gets what every root needs."""
    words = [
        {"compression": one.compression, "size": one.size, "digest": one.digest, "diff_id": one.diff_id}
        for one in layers
    ]
    job = {"job": "image", "layers": words, "limits": LIMITS | (limits or {}), "agent_mode": agent is not None}
    opened = [os.open(one.blob, os.O_RDONLY) for one in layers]
    opened.append(os.open(agent or "/dev/null", os.O_RDONLY))
    try:
        return run(job, [output.fileno(), scratch.fileno(), opened[-1], *opened[:-1]], **options)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def upper(
    source: int,
    output: BinaryIO,
    *,
    compression: str = "none",
    drop: Sequence[str] = (),
    limits: dict[str, int] | None = None,
    **options: Any,
) -> Ended:
    job = {"job": "upper", "limits": LIMITS | (limits or {}), "compression": compression, "drop": list(drop)}
    return run(job, [output.fileno(), source], **options)


def index(source: int, output: BinaryIO, *, limits: dict[str, int] | None = None, **options: Any) -> Ended:
    job = {"job": "index", "limits": LIMITS | (limits or {}), "hash": True}
    return run(job, [output.fileno(), source], **options)


@functools.cache
def planted_program() -> Path:
    """The binary that listens to CLOCHE_CONVERT_PLANTED; `just setup` has built it, so this copies."""
    out = ROOT / "build/planted"
    command = [str(ROOT / "tools/build_converter.sh"), "--features", "planted", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return out / CONVERTER.name
