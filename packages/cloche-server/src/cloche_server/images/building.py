"""The store as one build sees it: images to build on, roots to run steps in, layers, a memory of finished steps.

It implements `build.protocols.Shelf` and `BuildCache` for one owner. Everything that it hands out is held until the
build ends; roots and layers that nothing refers to then go. Steps are remembered for their owner alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final, Literal, cast

from cloche.wire.errors import error
from cloche.wire.images import ImageView
from cloche_server.images import blobs
from cloche_server.images.bringing import Bringer, config_bytes, manifest_bytes
from cloche_server.images.build.protocols import Base, Cached, LayerRef
from cloche_server.images.flights import finished
from cloche_server.images.layout import (
    CacheLayer,
    CacheRecord,
    ImageRecord,
    LayerRecord,
    cache_key,
    digest_of,
    hex_of,
    root_name,
)
from cloche_server.images.manifest import COMPRESSIONS
from cloche_server.images.reference import Reference
from cloche_server.images.roots import Roots, Say
from cloche_server.images.store import Store, blobs_of, layers_of
from cloche_server.images.views import config_of

EVERYBODY_WRITES: Final = 0o666


class Shelf:
    """One for a build: `async with`."""

    def __init__(
        self,
        store: Store,
        roots: Roots,
        bringer: Bringer,
        owner: str,
        *,
        ensure: Callable[[str], Awaitable[ImageRecord]],
        parse: Callable[[str], Reference],
        view: Callable[[ImageRecord], ImageView],
        say: Say,
    ) -> None:
        self._store = store
        self._roots = roots
        self._bringer = bringer
        self._owner = owner
        self._ensure = ensure
        self._parse = parse
        self._view = view
        self._say = say
        self._held = ExitStack()
        self._put: set[str] = set()

    async def __aenter__(self) -> Shelf:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._held.close()
        await finished(self._tidy())

    # --- Shelf --------------------------------------------------------------------------------------

    async def base(self, name: str) -> Base:
        image = await self._ensure(name)
        assert image.root_file is not None, "it was made before it is given out"
        self._hold([*blobs_of(image), image.root_file])
        return Base(
            digest=image.digest,
            layers=tuple(LayerRef(each.digest, each.diff_id, each.size, each.media_type) for each in image.layers),
            config=config_of(self._store, image).raw,
            root_file=image.root_file,
        )

    async def root(self, layers: Sequence[LayerRef]) -> str:
        records = [_record(layer) for layer in layers]
        self._require(layers)
        self._hold([self._roots.file_of(records)])
        return root_name(await self._roots.ensure(records, self._say))

    async def put_layer(self, fd: int, *, digest: str, diff_id: str, size: int) -> LayerRef:
        self._hold([digest])
        _, found = await blobs.put_file(self._store, fd, self._owner, expected=digest)
        if found != size:
            raise error("image_corrupt", f"The layer {digest} has {found} bytes, not {size}.")
        return LayerRef(digest, diff_id, size)

    async def commit(self, layers: Sequence[LayerRef], config: dict[str, Any], name: str | None) -> ImageView:
        """The same layers and config make the same digest."""
        self._require(layers)
        written = config_bytes(config, [layer.diff_id for layer in layers])
        self._hold([digest_of(written)])
        await blobs.put_bytes(self._store, written, self._owner)
        data = manifest_bytes(written, [(layer.media_type, layer.digest, layer.size) for layer in layers])
        image = await self._bringer.adopt(
            data,
            "",
            owner=self._owner,
            refs=[self._parse(name)] if name is not None else [],
            source="build",
            say=self._say,
            hold=lambda digest: self._hold([digest]),
        )
        return self._view(image)

    def temporary(self) -> int:
        return self._store.layout.scratch(EVERYBODY_WRITES)

    # --- BuildCache ---------------------------------------------------------------------------------

    async def get(self, key: str) -> Cached | None:
        step = self._store.cache.get(cache_key(self._owner, key))
        if step is None or not all(self._store.has_blob(each, self._owner) for each in layers_of(step)):
            return None
        self._hold(layers_of(step))
        self._store.mark_step(cache_key(self._owner, key))
        layers = (LayerRef(each.digest, each.diff_id, each.size, each.media_type) for each in step.layers)
        return Cached(tuple(layers), step.created)

    async def put(self, key: str, made: Cached) -> None:
        self._require(made.layers)
        step = CacheRecord(
            scope=self._owner,
            key=key,
            layers=[
                CacheLayer(digest=each.digest, diff_id=each.diff_id, size=each.size, media_type=each.media_type)
                for each in made.layers
            ],
            created=made.created,
        )
        async with self._store.changing:
            await self._store.save_step(step)

    # --- how ----------------------------------------------------------------------------------------

    def _hold(self, things: Sequence[str] | set[str]) -> None:
        self._put.update(things)
        self._held.enter_context(self._store.holding(things))

    def _require(self, layers: Sequence[LayerRef]) -> None:
        for layer in layers:
            if not self._store.has_blob(layer.digest, self._owner):
                raise error("image_corrupt", f"The layer {layer.digest} is missing.", detail={"digest": layer.digest})

    async def _tidy(self) -> None:
        """What only this build needed."""
        async with self._store.changing:
            for key in self._store.unreferenced_roots():
                if root_name(key) in self._put:
                    await self._store.remove_root(key)
            ours = {hex_of(each) for each in self._put if each.startswith("sha256:")}
            for name in ours & set(self._store.unreferenced_blobs()):
                await self._store.remove_blob(name)


def _record(layer: LayerRef) -> LayerRecord:
    compression = COMPRESSIONS.get(layer.media_type)
    if compression is None:
        raise error("image_refused", "A layer is of an unknown type.", detail={"reason": "layer_type"})
    return LayerRecord(
        digest=layer.digest,
        size=layer.size,
        media_type=layer.media_type,
        compression=cast(Literal["none", "gzip", "zstd"], compression),
        diff_id=layer.diff_id,
    )
