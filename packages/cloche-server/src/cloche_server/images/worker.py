"""The converter seen from the daemon: one process for one job, killed after it, whatever it says.

A job is one message with the descriptors beside it; then come progress and one answer (`answers`). Bounds on time, bytes and
messages are kept here as well as in the worker: the worker reads hostile bytes and may be somebody else's by then.
"""

from __future__ import annotations

import array
import asyncio
import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from cloche.wire.errors import ClocheError, error
from cloche_server import points
from cloche_server.images import answers
from cloche_server.images.answers import Entry, LayerMade, Lie, RootMade
from cloche_server.images.reference import shown

__all__ = ["DEFAULT", "Converter", "Entry", "LayerFile", "LayerMade", "Limits", "RootMade", "Started", "Starter"]

MIB: Final = 1024 * 1024
GIB: Final = 1024 * MIB
LAYERS_MAX: Final = 128
EMPTY_TAR: Final = bytes(1024)
JOB_BYTES_MAX: Final = MIB
READ_BYTES: Final = 64 * 1024
PROGRESS_PER_S: Final = 10
MESSAGES_MORE: Final = 100
GRACE_S: Final = 10.0
"""The worker ends itself at its limit; this long after it the daemon does."""
DISK_RESERVE_BYTES: Final = 256 * MIB
"""Left free for everything else on the store's disk."""
METADATA_BYTES: Final = GIB
"""What a file that is made may have beyond the bytes of the archive."""
INDEX_BYTES_MAX: Final = 512 * MIB
LAST_WORDS_MAX: Final = 300

Made = TypeVar("Made", RootMade, LayerMade)


class Started(Protocol):
    """A worker that waits for its job."""

    @property
    def channel(self) -> socket.socket: ...

    def last_words(self) -> str:
        """What it wrote to stderr: hostile text."""
        ...

    async def kill(self) -> int:
        """Everything of it is gone afterwards; how often the kernel killed in it for memory."""
        ...


class Starter(Protocol):
    """Starts a worker behind its walls; ClocheError when that fails."""

    async def __call__(self, *, memory_bytes: int, disk_bytes: int) -> Started: ...


@dataclass(frozen=True)
class Limits:
    """What an image may be. The worker is told, and the daemon keeps time, memory and disk itself."""

    raw_bytes: int = 64 * GIB
    entries: int = 1_000_000
    depth: int = 128
    name_bytes: int = 255
    path_bytes: int = 4096
    header_bytes: int = MIB
    ratio: int = 1000
    seconds: int = 900
    memory_bytes: int = GIB
    index_entries: int = 300_000
    """Of an index, which the daemon holds in memory."""

    def told(self, raw_bytes: int, entries: int) -> dict[str, int]:
        return {
            "raw_bytes": raw_bytes,
            "entries": entries,
            "depth": self.depth,
            "name_bytes": self.name_bytes,
            "path_bytes": self.path_bytes,
            "header_bytes": self.header_bytes,
            "ratio": self.ratio,
            "seconds": self.seconds,
        }


DEFAULT: Final = Limits()


@dataclass(frozen=True)
class LayerFile:
    """One layer's blob, open for reading, and what it must turn out to be."""

    fd: int
    compression: str
    size: int
    digest: str
    diff_id: str

    def told(self) -> dict[str, Any]:
        return {
            "compression": self.compression,
            "size": self.size,
            "digest": self.digest,
            "diff_id": self.diff_id,
        }


class Converter:
    """Does one job in one worker. Any number may be under way."""

    def __init__(self, start: Starter, limits: Limits = DEFAULT) -> None:
        self._start = start
        self._limits = limits

    async def image(
        self,
        layers: Sequence[LayerFile],
        output: int,
        scratch: int,
        agent: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> RootMade:
        """All layers → one EROFS file in `output`. Output and scratch are empty files without a name."""
        if len(layers) > LAYERS_MAX:
            raise _refused("too_many_layers", f"It has more than {LAYERS_MAX} layers.")
        if not layers:
            with _empty_layer() as layer:
                return await self.image([layer], output, scratch, agent, progress)
        os.fchmod(output, 0o666)  # mkfs opens it anew, as somebody else than who made it
        raw_bytes = self._raw_bytes(output, files=2)
        job = {
            "job": "image",
            "layers": [layer.told() for layer in layers],
            "limits": self._limits.told(raw_bytes, self._limits.entries),
            "agent_mode": True,
        }
        fds = [output, scratch, agent, *(layer.fd for layer in layers)]
        told = progress if progress is not None else _nobody
        done = await self._do(job, fds, raw_bytes + METADATA_BYTES, told)
        return _believed(answers.root_of, done, os.fstat(output).st_size)

    async def upper(
        self, source: int, output: int, *, compression: str = "gzip", drop: Sequence[str] = ()
    ) -> LayerMade:
        """A sandbox's writable layer (runsc's tar) → one OCI layer in `output`. From a pipe it must fit into its memory."""
        raw_bytes = self._raw_bytes(output, files=1)
        job = {
            "job": "upper",
            "limits": self._limits.told(raw_bytes, self._limits.entries),
            "compression": compression,
            "drop": list(drop),
        }
        done = await self._do(job, [output, source], raw_bytes + METADATA_BYTES, _nobody)
        return _believed(answers.layer_of, done, os.fstat(output).st_size)

    async def index(self, source: int, output: int) -> list[Entry]:
        """The entries of a plain tar in a file, in its order, with each file's place and hash."""
        raw_bytes = self._raw_bytes(output, files=1)
        entries_max = min(self._limits.entries, self._limits.index_entries)
        job = {"job": "index", "limits": self._limits.told(raw_bytes, entries_max), "hash": True}
        done = await self._do(job, [output, source], INDEX_BYTES_MAX, _nobody)
        return await asyncio.to_thread(self._read_index, done, source, output, entries_max)

    def _read_index(self, done: Any, source: int, output: int, entries_max: int) -> list[Entry]:
        source_bytes, path_bytes = os.fstat(source).st_size, self._limits.path_bytes
        try:
            wanted = answers.number(done, "entries", entries_max) if isinstance(done, dict) else -1
            found = []
            for line in _lines(output):
                found.append(answers.entry_of(line, source_bytes, path_bytes))
                if len(found) > wanted:
                    break
            if len(found) != wanted:
                raise Lie(f"{wanted} entries were announced")
        except Lie as lie:
            raise _lied(lie) from None
        return found

    def _raw_bytes(self, output: int, *, files: int) -> int:
        """The limit, or less where the disk is fuller than that: `files` of them grow beside each other."""
        disk = os.fstatvfs(output)
        free = disk.f_bavail * disk.f_frsize - DISK_RESERVE_BYTES
        if free < MIB:
            raise error(
                "image_too_large",
                "The disk of the image store is full.",
                detail={"reason": "no_space", "layer": None, "entry": None},
                fix="Free space on the node's disk: cloche image gc",
            )
        return min(self._limits.raw_bytes, free // files)

    async def _do(self, job: dict[str, Any], fds: list[int], disk_bytes: int, told: Callable[[int, int], None]) -> Any:
        """The `done` of one worker, which is gone afterwards."""
        message = json.dumps(job, separators=(",", ":")).encode()
        assert len(message) <= JOB_BYTES_MAX
        _rewind(fds)
        worker = await self._start(memory_bytes=self._limits.memory_bytes, disk_bytes=disk_bytes)
        failed: Exception | None = None
        done: Any = None
        said = ""
        try:
            async with asyncio.timeout(self._limits.seconds + GRACE_S):
                await _send(worker.channel, len(message).to_bytes(4, "little") + message, fds)
                points.reached("images.convert.asked")
                done = await self._answer(worker.channel, len(fds), told)
        except (ClocheError, Lie, OSError, TimeoutError) as bad:  # OSError: it hung up
            failed, said = bad, worker.last_words()
        finally:
            oom_kills = await asyncio.shield(worker.kill())
        points.reached("images.convert.answered")
        if failed is not None:
            raise self._told(failed, oom_kills, said) from None
        return done

    async def _answer(self, channel: socket.socket, layers: int, told: Callable[[int, int], None]) -> Any:
        frames = answers.Frames(self._limits.seconds * PROGRESS_PER_S + MESSAGES_MORE)
        while True:
            data = await asyncio.get_running_loop().sock_recv(channel, READ_BYTES)
            if not data:
                raise ConnectionResetError
            for message in frames.feed(data):
                [(name, body)] = message.items()
                if name == "done":
                    return body
                if name == "refused":
                    raise answers.refusal_of(body)
                if name != "progress":
                    raise Lie(f"an unknown message: {shown(name, 40)}")
                told(*answers.progress_of(body, layers))
            await asyncio.sleep(0)  # one that sends without a pause must not keep the loop to itself

    def _told(self, failed: Exception, oom_kills: int, said: str) -> ClocheError:
        if isinstance(failed, ClocheError):
            return failed
        if oom_kills:
            text = f"Converting it takes more than {self._limits.memory_bytes} bytes of memory."
            return _too_large("memory", text)
        if isinstance(failed, TimeoutError):
            return _too_large("time", f"Converting it takes more than {self._limits.seconds} s.")
        if isinstance(failed, Lie):
            return _lied(failed)
        return _refused("converter_died", f"The converter died of it. {_end_of(said)}".rstrip())


def _believed(check: Callable[[Any, int], Made], done: Any, file_bytes: int) -> Made:
    try:
        return check(done, file_bytes)
    except Lie as lie:
        raise _lied(lie) from None


def _lied(lie: Lie) -> ClocheError:
    return _refused("converter_failed", f"The converter answered what it may not: {lie}.")


def _refused(reason: str, text: str) -> ClocheError:
    return error("image_refused", text, detail={"reason": reason, "layer": None, "entry": None})


def _too_large(reason: str, text: str) -> ClocheError:
    return error("image_too_large", text, detail={"reason": reason, "layer": None, "entry": None})


def _end_of(said: str) -> str:
    return shown(said.strip()[-LAST_WORDS_MAX:], 2 * LAST_WORDS_MAX)


def _nobody(layer: int, done: int) -> None:
    """Nobody wants to know how far it is."""


def _rewind(fds: list[int]) -> None:
    """The worker reads and writes where the descriptor stands."""
    for fd in fds:
        with suppress(OSError):  # a pipe has no place
            os.lseek(fd, 0, os.SEEK_SET)


@contextmanager
def _empty_layer() -> Iterator[LayerFile]:
    """An archive without entries: the layer of an image that has none."""
    fd = os.memfd_create("empty-layer")
    try:
        os.write(fd, EMPTY_TAR)
        digest = f"sha256:{hashlib.sha256(EMPTY_TAR).hexdigest()}"
        yield LayerFile(fd, "none", len(EMPTY_TAR), digest, digest)
    finally:
        os.close(fd)


async def _send(channel: socket.socket, message: bytes, fds: list[int]) -> None:
    """The descriptors go with the first byte."""
    loop = asyncio.get_running_loop()
    channel.setblocking(False)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    while True:
        try:
            sent = channel.sendmsg([message], ancillary, socket.MSG_NOSIGNAL)
            break
        except BlockingIOError:
            await _writable(channel)
    if sent < len(message):  # nothing more to say may already find it gone, with its answer on the way
        await loop.sock_sendall(channel, message[sent:])


async def _writable(channel: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(channel, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(channel)


def _lines(fd: int) -> Iterator[bytes]:
    at, rest = 0, b""
    while at < INDEX_BYTES_MAX and (piece := os.pread(fd, MIB, at)):
        at += len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > answers.LINE_BYTES_MAX:
            raise Lie("a line of the index without an end")
        yield from lines
    if rest:
        raise Lie("an index that is cut off")
