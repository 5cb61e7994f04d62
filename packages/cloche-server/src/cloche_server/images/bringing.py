"""Images that are brought, not pulled: blobs that an archive or a build put into the store become an image.

Everything is held until the image is published; what no image refers to afterwards goes again.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Literal

import msgspec

from cloche.wire.errors import error
from cloche_server.images import blobs
from cloche_server.images.flights import finished
from cloche_server.images.layout import ImageRecord, LayerRecord, digest_of, hex_of
from cloche_server.images.manifest import (
    CONFIG_BYTES_MAX,
    LAYERS_MAX,
    OCI_CONFIG,
    OCI_MANIFEST,
    ImageConfig,
    Manifest,
    check_pair,
    host_platform,
    matches,
    parse_config,
    parse_manifest,
    parse_platform,
)
from cloche_server.images.publishing import layers_of, merged, publish
from cloche_server.images.reference import Reference
from cloche_server.images.roots import Roots, Say
from cloche_server.images.store import Store
from cloche_server.images.trusting import Trusting

Hold = Callable[[str], None]


@asynccontextmanager
async def bringing(store: Store) -> AsyncIterator[Hold]:
    """Gives a function that holds a blob to the end."""
    with ExitStack() as held:
        put: set[str] = set()

        def hold(digest: str) -> None:
            put.add(digest)
            held.enter_context(store.holding([digest]))

        try:
            yield hold
        finally:
            held.close()
            await finished(_tidy(store, put))


async def _tidy(store: Store, put: set[str]) -> None:
    async with store.changing:
        for name in {hex_of(digest) for digest in put} & set(store.unreferenced_blobs()):
            await store.remove_blob(name)


class Bringer:
    """Publishes images whose blobs are there."""

    def __init__(self, store: Store, roots: Roots, trusting: Trusting) -> None:
        self._store = store
        self._roots = roots
        self._trusting = trusting

    async def adopt(
        self,
        data: bytes,
        media_type: str,
        *,
        owner: str,
        refs: Sequence[Reference],
        source: Literal["archive", "build"],
        say: Say,
        hold: Hold,
        indexes: Sequence[bytes] = (),
    ) -> ImageRecord:
        """The image of this manifest. Its config and layers were put, by this owner, and are held."""
        store = self._store
        manifest = parse_manifest(data, media_type)
        if not isinstance(manifest, Manifest):
            raise error("image_refused", "An index stands where a manifest must.", detail={"reason": "nested_index"})
        for each in (manifest.config, *manifest.layers):
            if not store.has_blob(each.digest, owner):
                raise error("image_corrupt", f"{each.digest} is missing.", detail={"digest": each.digest})
        config = parse_config(store.read_blob(manifest.config.digest, CONFIG_BYTES_MAX))
        check_pair(manifest, config)
        for top in (data, *indexes):
            hold(digest_of(top))
            await blobs.put_bytes(store, top, owner)
        layers = layers_of(manifest, config)
        record = ImageRecord(
            digest=digest_of(data),
            media_type=manifest.media_type,
            size=len(data),
            platform=_platform(config),
            source=source,
            config=manifest.config.digest,
            config_size=manifest.config.size,
            layers=layers,
            indexes=[digest_of(index) for index in indexes],
            owners=[owner],
            created=config.created,
            added_at=store.clock(),
        )
        known = store.images.get(record.digest)
        await self._trusting.check_kept(refs, record if known is None else merged(known, record), store)
        return await self._finish(record, layers, owner, refs, say)

    async def _finish(
        self, record: ImageRecord, layers: list[LayerRecord], owner: str, refs: Sequence[Reference], say: Say
    ) -> ImageRecord:
        with self._store.holding([self._roots.file_of(layers)]):
            root = await self._roots.ensure(layers, say)
            whole = msgspec.structs.replace(record, root=root)
            return await publish(self._store, whole, [ref.name for ref in refs], owner)


def _platform(config: ImageConfig) -> str:
    host = host_platform()
    return str(host) if matches(config, host) else str(parse_platform(str(config.platform)))


def config_bytes(config: dict[str, Any], diff_ids: Sequence[str]) -> bytes:
    """The same bytes for the same image, whatever order it was said in."""
    host = host_platform()
    whole = {
        "architecture": host.architecture,
        "os": host.os,
        **config,
        "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
    }
    return canonical(whole)


def manifest_bytes(config: bytes, layers: Sequence[tuple[str, str, int]]) -> bytes:
    """An OCI manifest; layers are media type, digest and size."""
    if len(layers) > LAYERS_MAX:
        raise error("image_refused", f"An image has at most {LAYERS_MAX} layers.", detail={"reason": "too_many_layers"})
    return canonical(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": {"mediaType": OCI_CONFIG, "digest": digest_of(config), "size": len(config)},
            "layers": [{"mediaType": kind, "digest": digest, "size": size} for kind, digest, size in layers],
        }
    )


def canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
