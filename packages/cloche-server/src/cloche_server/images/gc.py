"""Garbage collection: what nobody needs goes first, then what was not used for longest.

In this order: partial downloads, blobs and roots that nothing refers to, images without a name; then by age and by size,
images and steps of builds, least recently used first. What a sandbox runs from, what somebody in this process holds, and
prebuilt roots stay, whatever the limits say.
"""

from __future__ import annotations

from asyncio import to_thread
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from cloche.wire.images import GcResult
from cloche_server import points
from cloche_server.images.flights import finished
from cloche_server.images.store import Store, layers_of, unlink


@dataclass
class _Removed:
    images: list[str] = field(default_factory=list)
    blobs: int = 0
    roots: int = 0
    bytes: int = 0


async def collect(store: Store, *, max_bytes: int | None = None, max_age_s: float | None = None) -> GcResult:
    """Without limits: only what nobody needs."""
    removed = _Removed()
    async with store.changing:
        for path in store.partials():
            removed.bytes += await finished(to_thread(unlink, path))
        points.reached("images.gc.after_partials")
        for name in store.unreferenced_blobs():
            removed.bytes += await store.remove_blob(name)
            removed.blobs += 1
        for key in store.unreferenced_roots():
            removed.bytes += await store.remove_root(key)
            removed.roots += 1
        points.reached("images.gc.after_unreferenced")
        named = {name.digest for name in store.names.values()}
        for digest in [digest for digest in store.images if digest not in named]:
            await _remove_image(store, digest, removed)
        if max_age_s is not None:
            for used_at, kind, key in list(_by_age(store)):
                if store.clock() - used_at > max_age_s:
                    await _remove(store, kind, key, removed)
        if max_bytes is not None:
            for _, kind, key in list(_by_age(store)):
                if store.bytes() <= max_bytes:
                    break
                await _remove(store, kind, key, removed)
    return GcResult(images=removed.images, blobs=removed.blobs, roots=removed.roots, bytes=removed.bytes)


def _by_age(store: Store) -> Iterator[tuple[float, str, str]]:
    """When it was last used, what it is, its key; the longest unused first."""
    images = [(store.used_at(digest), "image", digest) for digest in store.images]
    steps = [(store.layout.cache_file(key).stat().st_mtime, "step", key) for key in store.cache]
    return iter(sorted(images + steps))


async def _remove(store: Store, kind: str, key: str, removed: _Removed) -> None:
    if kind == "image":
        await _remove_image(store, key, removed)
    elif not any(store.is_held(digest) for digest in layers_of(store.cache[key])):
        blobs, freed = await store.drop_step(key)
        removed.blobs += blobs
        removed.bytes += freed


async def _remove_image(store: Store, digest: str, removed: _Removed) -> None:
    uses: Counter[str] = store.uses()
    if store.is_image_busy(store.images[digest], uses):
        return
    blobs, roots, freed = await store.remove_image(digest)
    removed.images.append(digest)
    removed.blobs += blobs
    removed.roots += roots
    removed.bytes += freed
