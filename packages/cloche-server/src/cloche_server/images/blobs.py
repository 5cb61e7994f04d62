"""Blobs on their way into the store: written to a partial file, verified, published.

A download that stops leaves its partial file, and the next one goes on from there; the hash over what is there is taken
again from its bytes. Only bytes whose length and sha256 are right get a place among the blobs. The partial's name stays
until an image refers to the blob, so that a crash in between costs no download.
Hashing and writing happen in a thread, while the loop receives the next piece.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
from asyncio import to_thread
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Final

from cloche.wire.errors import ClocheError, error
from cloche_server import points
from cloche_server.images.flights import finished
from cloche_server.images.layout import digest_of, hex_of, publish, sync_directory, write_all
from cloche_server.images.store import Store

BATCH_BYTES: Final = 1024 * 1024
SPARE_BYTES: Final = 256 * 1024 * 1024
"""What a download leaves free on the disk."""

Reader = Callable[[int, bool], AsyncGenerator[bytes, None]]
"""The blob's bytes from an offset on; True when what came before was damaged, so that another place is asked."""


class Partial:
    """One unfinished file and the hash of what is in it."""

    def __init__(self, path: Path, digest: str, size: int) -> None:
        self._digest = digest
        self._size = size
        self._path = path
        self._hash = hashlib.sha256()
        self.offset = 0
        self._fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self) -> None:
        os.close(self._fd)

    def restore(self) -> None:
        """Reads what an earlier download left. Blocks."""
        found = os.fstat(self._fd)
        while self.offset <= self._size and (data := os.pread(self._fd, BATCH_BYTES, self.offset)):
            self._hash.update(data)
            self.offset += len(data)
        if self.offset < self._size and found.st_mode & 0o200 and found.st_nlink == 1:
            os.close(self._fd)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        elif not self.is_right:  # too long, or sealed and damaged: a sealed file may be a blob too, and is not written
            self._restart()

    @property
    def is_right(self) -> bool:
        return self.offset == self._size and self._hash.hexdigest() == hex_of(self._digest)

    def _restart(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._hash = hashlib.sha256()
        self.offset = 0

    async def receive(self, source: AsyncGenerator[bytes, None], progress: Callable[[int], None]) -> None:
        """To its end; more than the blob's size is refused."""
        batch: list[bytes] = []
        waiting, received = 0, self.offset
        writing: asyncio.Task[None] | None = None
        try:
            async with aclosing(source) as pieces:
                async for piece in pieces:
                    batch.append(piece)
                    waiting += len(piece)
                    received += len(piece)
                    if received > self._size:
                        raise _corrupt(self._digest, f"it is longer than the {self._size} bytes that were announced")
                    if waiting >= BATCH_BYTES:
                        if writing is not None:
                            await writing
                        writing = asyncio.create_task(to_thread(self._take, batch))
                        batch, waiting = [], 0
                        progress(received)
        finally:
            if writing is not None:
                await finished(_result(writing))
            if batch:
                await finished(to_thread(self._take, batch))
                progress(received)

    def verify(self) -> None:
        if self.offset < self._size:
            raise error("registry_unreachable", f"{self._digest} ended after {self.offset} of {self._size} bytes.")
        if not self.is_right:
            raise _corrupt(self._digest, "its content has another hash")

    def publish(self, path: Path) -> None:
        """Blocks. The partial keeps its own name too."""
        os.fchmod(self._fd, 0o444)
        os.fsync(self._fd)
        points.reached("images.blob.before_link")
        with suppress(FileExistsError):  # somebody of another scope was first: the bytes are the same
            os.link(self._path, path, follow_symlinks=False)
        sync_directory(path.parent)
        points.reached("images.blob.after_link")

    def _take(self, batch: list[bytes]) -> None:
        data = batch[0] if len(batch) == 1 else b"".join(batch)
        view = memoryview(data)
        while view:
            view = view[os.pwrite(self._fd, view, self.offset + len(data) - len(view)) :]
        self._hash.update(data)
        self.offset += len(data)


async def fetch(
    store: Store, digest: str, size: int, scope: str, read: Reader, progress: Callable[[int], None] | None = None
) -> None:
    """The blob is in the store when this returns; image_corrupt, no_space or what `read` raises otherwise.

    What turns out to be damaged is fetched once more from its start: the damage may be what an earlier download left,
    or a mirror's.
    """
    path = store.layout.partial_file(digest, scope)
    with store.holding((path.name,)):
        check_space(store.layout.tmp, size)
        try:
            for is_again in (False, True):
                partial = Partial(path, digest, size)
                try:
                    await finished(to_thread(partial.restore))
                    if partial.offset < size:
                        await partial.receive(read(partial.offset, is_again), progress or _ignored)
                    partial.verify()
                    points.reached("images.blob.after_partial")
                    await finished(to_thread(partial.publish, store.layout.blob(digest)))
                    store.prove(digest, scope)
                    return
                except ClocheError as failed:
                    if failed.code == "image_corrupt":
                        path.unlink(missing_ok=True)
                    if failed.code != "image_corrupt" or is_again:
                        raise
                finally:
                    partial.close()
        except OSError as failed:
            raise _disk(failed) from failed


def forget_partials(store: Store, digests: set[str], scope: str) -> None:
    """An image refers to these blobs now."""
    for digest in digests:
        path = store.layout.partial_file(digest, scope)
        if not store.is_held(path.name):
            path.unlink(missing_ok=True)


async def put_bytes(store: Store, data: bytes, scope: str) -> str:
    """A small blob of our own making, or that was verified while it was read; its digest."""
    digest = digest_of(data)
    if not store.has_blob(digest, scope):
        fd = store.layout.scratch()
        try:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(data)
            await finished(to_thread(_publish, fd, store.layout.blob(digest)))
        except OSError as failed:
            raise _disk(failed) from failed
        finally:
            os.close(fd)
        store.prove(digest, scope)
    return digest


async def put_file(store: Store, fd: int, scope: str, *, expected: str | None = None) -> tuple[str, int]:
    """A whole file, by descriptor: digest and size. One from `Layout.scratch` is published itself, others are copied."""
    size = os.fstat(fd).st_size
    digest = "sha256:" + await finished(to_thread(_hash, fd, size))
    if expected not in (None, digest):
        raise _corrupt(str(expected), "its content has another hash")
    if not store.has_blob(digest, scope):
        try:
            await finished(to_thread(_publish_or_copy, store, fd, digest, size))
        except OSError as failed:
            raise _disk(failed) from failed
        store.prove(digest, scope)
    return digest, size


async def copy_range(
    store: Store,
    fd: int,
    offset: int,
    size: int,
    scope: str,
    expected: str | None,
    hold: Callable[[str], None] | None = None,
) -> str:
    """A part of a file (an archive's entry) as a blob; image_corrupt when its hash is not the expected one."""

    def copy() -> str:
        found, at = hashlib.sha256(), offset
        while at < offset + size:
            data = os.pread(fd, min(BATCH_BYTES, offset + size - at), at)
            if not data:
                raise _corrupt(expected or "the entry", "the archive ends before it")
            found.update(data)
            at += len(data)
            write_all(out, data)
        return "sha256:" + found.hexdigest()

    out = store.layout.scratch()
    try:
        check_space(store.layout.tmp, size)
        digest = await finished(to_thread(copy))
        if expected not in (None, digest):
            raise _corrupt(str(expected), "its content has another hash")
        if hold is not None:
            hold(digest)
        await finished(to_thread(_publish, out, store.layout.blob(digest)))
    except OSError as failed:
        raise _disk(failed) from failed
    finally:
        os.close(out)
    store.prove(digest, scope)
    return digest


def _publish(fd: int, path: Path) -> None:
    points.reached("images.blob.before_link")
    publish(fd, path)
    points.reached("images.blob.after_link")


def _publish_or_copy(store: Store, fd: int, digest: str, size: int) -> None:
    path = store.layout.blob(digest)
    if os.fstat(fd).st_nlink == 0:  # a file that has a name may be written by who knows it
        try:
            _publish(fd, path)
            return
        except OSError as failed:
            if failed.errno not in (errno.EXDEV, errno.ENOENT, errno.EPERM):
                raise
    out = store.layout.scratch()
    try:
        with os.fdopen(os.dup(fd), "rb", closefd=True) as source, os.fdopen(os.dup(out), "wb") as sink:
            source.seek(0)
            shutil.copyfileobj(source, sink, BATCH_BYTES)
        if _hash(out, size) != hex_of(digest):
            raise _corrupt(digest, "it changed while it was read")
        _publish(out, path)
    finally:
        os.close(out)


def _hash(fd: int, size: int) -> str:
    found, at = hashlib.sha256(), 0
    while at < size and (data := os.pread(fd, min(BATCH_BYTES, size - at), at)):
        found.update(data)
        at += len(data)
    return found.hexdigest()


def check_space(place: Path | int, size: int) -> None:
    """Raises no_space."""
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    if size + SPARE_BYTES > free:
        raise error(
            "no_space",
            f"A blob of {size} bytes does not fit: {free} bytes are free on the disk of the image store.",
            fix="Remove images that you do not need: cloche image gc",
        )


def _disk(failed: OSError) -> ClocheError:
    return error(
        "no_space" if failed.errno in (errno.ENOSPC, errno.EDQUOT) else "internal",
        f"The image store cannot be written: {failed.strerror}.",
        fix="Free space on the disk of the image store: cloche image gc",
    )


def _corrupt(digest: str, why: str) -> ClocheError:
    return error("image_corrupt", f"The blob {digest} is damaged: {why}.", detail={"digest": digest})


async def _result(task: asyncio.Task[None]) -> None:
    await task


def _ignored(_: int) -> None:
    pass
