"""Roots: the layers of an image become one EROFS file, once.

A root is named by what makes its bytes: the layers' diff_ids, the converter's version, the agent. When one of these is
another than last time, the root is made again from the blobs, without the network. A root that is there is taken only for
layers that the converter has seen unpack to those diff_ids: what a config says of itself proves nothing.
"""

from __future__ import annotations

import os
from asyncio import to_thread
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Protocol

from cloche.wire.errors import ClocheError, error
from cloche.wire.images import ImageEvent
from cloche_server.images.flights import Flights, finished
from cloche_server.images.layout import LayerRecord, RootRecord, root_key, root_name, sha256_file
from cloche_server.images.store import Store
from cloche_server.images.worker import LayerFile, RootMade

Say = Callable[[ImageEvent], None]
EVERYBODY_WRITES: Final = 0o666
"""The converter has another uid, and these files have no name."""


class ImageConverter(Protocol):
    """`worker.Converter`, as far as roots ask it."""

    async def image(
        self,
        layers: Sequence[LayerFile],
        output: int,
        scratch: int,
        agent: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> RootMade: ...


class Roots:
    """Makes them, each once at a time."""

    def __init__(self, store: Store, converter: ImageConverter, version: str, agent: Path) -> None:
        self._store = store
        self._converter = converter
        self._version = version
        self._agent = agent
        self._agent_sha256 = sha256_file(agent)
        self._flights: Flights[ImageEvent, None] = Flights()
        self._seen: set[tuple[str, str]] = set()
        """Blobs whose diff_id the converter confirmed since this node started."""

    def key(self, diff_ids: Sequence[str]) -> str:
        return root_key(diff_ids, self._version, self._agent_sha256)

    async def ensure(self, layers: Sequence[LayerRecord], say: Say) -> str:
        """The key of their root, which is there now. The caller holds the blobs and `file_of` these layers."""
        pairs = [(layer.digest, layer.diff_id) for layer in layers]
        key = self.key([layer.diff_id for layer in layers])
        if not self._store.has_root(key) or not (self._seen.issuperset(pairs) or self._store.are_known(pairs)):
            await self._flights.join((key, *pairs), lambda tell: self._make(key, layers, tell), say)
            self._seen.update(pairs)
        return key

    def file_of(self, layers: Sequence[LayerRecord]) -> str:
        return root_name(self.key([layer.diff_id for layer in layers]))

    async def close(self) -> None:
        await self._flights.close()

    async def _make(self, key: str, layers: Sequence[LayerRecord], say: Say) -> None:
        def progress(layer: int, done: int) -> None:
            say(ImageEvent(kind="convert", bytes_done=done, number=min(layer + 1, len(layers)), of=len(layers)))

        store = self._store
        with store.holding([root_name(key), *(layer.digest for layer in layers)]), ExitStack() as closing:

            def kept(fd: int) -> int:
                closing.callback(os.close, fd)
                return fd

            files = [
                LayerFile(kept(store.open_blob(each.digest)), each.compression, each.size, each.digest, each.diff_id)
                for each in layers
            ]
            output = kept(store.layout.scratch(EVERYBODY_WRITES))
            scratch = kept(store.layout.scratch(EVERYBODY_WRITES))
            agent = kept(os.open(self._agent, os.O_RDONLY | os.O_CLOEXEC))
            progress(0, 0)
            made = await self._converter.image(files, output, scratch, agent, progress)
            await self._keep(output, key, layers, made)

    async def _keep(self, output: int, key: str, layers: Sequence[LayerRecord], made: RootMade) -> None:
        store = self._store
        record = RootRecord(
            key=key,
            root_sha256=made.root_sha256,
            root_bytes=made.root_bytes,
            raw_bytes=made.raw_bytes,
            entries=made.entries,
            diff_ids=[layer.diff_id for layer in layers],
            converter=self._version,
            agent=self._agent_sha256,
            lost=made.lost,
            made_at=store.clock(),
        )
        async with store.changing:
            there = store.roots.get(key) if store.has_root(key) else None
            if there is not None and there.root_sha256 == made.root_sha256:
                return  # these layers make the same, as they should: now we know
            if there is None:
                await finished(to_thread(store.layout.root_file(key).unlink, missing_ok=True))
            try:
                await store.save_root(output, record)
            except OSError as failed:
                raise _no_place(failed) from failed


def _no_place(failed: OSError) -> ClocheError:
    return error("no_space", f"The root cannot be kept: {failed.strerror}.", fix="Free space: cloche image gc")
