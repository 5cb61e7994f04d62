"""The last step of everything that brings an image: its record, then its names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, cast

import msgspec

from cloche_server.images import blobs
from cloche_server.images.layout import ImageRecord, LayerRecord, NameRecord
from cloche_server.images.manifest import ImageConfig, Manifest
from cloche_server.images.store import Store, blobs_of

INDEXES_MAX: Final = 16


def layers_of(manifest: Manifest, config: ImageConfig) -> list[LayerRecord]:
    return [
        LayerRecord(
            digest=layer.digest,
            size=layer.size,
            media_type=layer.media_type,
            compression=cast(Literal["none", "gzip", "zstd"], layer.compression),
            diff_id=diff_id,
        )
        for layer, diff_id in zip(manifest.layers, config.diff_ids, strict=True)
    ]


async def publish(store: Store, record: ImageRecord, names: Sequence[str], scope: str) -> ImageRecord:
    """The image and then its names. What is known of it from before stays known."""
    async with store.changing:
        before = store.images.get(record.digest)
        if before is not None:
            record = merged(before, record)
        await store.save_image(record)
        for name in names:
            await store.save_name(
                NameRecord(name=name, scope=scope, platform=record.platform, digest=record.digest, at=store.clock())
            )
        blobs.forget_partials(store, blobs_of(record), scope)
    return record


def merged(before: ImageRecord, now: ImageRecord) -> ImageRecord:
    """The same image, brought again: by another name, owner or index, or with more signatures."""

    def both(first: Sequence[str], second: Sequence[str]) -> list[str]:
        return list(dict.fromkeys((*first, *second)))

    changes: dict[str, Any] = {
        "indexes": both(now.indexes, before.indexes)[:INDEXES_MAX],
        "public": before.public or now.public,
        "owners": both(before.owners, now.owners),
        "signatures": both(before.signatures, now.signatures),
        "signed_by": both(before.signed_by, now.signed_by),
        "added_at": before.added_at,
        "source": before.source,
    }
    return msgspec.structs.replace(now, **changes)
