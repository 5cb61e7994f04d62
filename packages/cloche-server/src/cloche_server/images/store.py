"""The store: what is in the directory, who may see it, who holds it. One node at a time.

The records are read once, when the store is opened, and kept in memory; every change goes to the disk first. Opening also
finishes what a crash left: unfinished files, blobs and roots that no image refers to, names of images that are
gone. A *hold* keeps a blob, a root or an image from being collected while somebody in this process works with it.
"""

from __future__ import annotations

import asyncio
import os
import time
from asyncio import to_thread
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cloche.wire.errors import error
from cloche_server import points
from cloche_server.images import opening
from cloche_server.images.flights import finished
from cloche_server.images.layout import (
    HEX,
    PUBLIC,
    CacheRecord,
    ImageRecord,
    Layout,
    NameRecord,
    RootRecord,
    cache_key,
    hex_of,
    name_key,
    publish,
    root_name,
    size_of,
    sync_directory,
    write_record,
)

HANDOVER_S: Final = 60.0
"""A root that was given out for a new sandbox is not collected before that sandbox counts as running."""


class Store:
    """See the module. Everything runs on the event loop's thread; what waits for the disk does so in a thread of its own."""

    def __init__(
        self, layout: Layout, lock_fd: int, clock: Callable[[], float], in_use: Callable[[], Iterable[str]]
    ) -> None:
        self.layout = layout
        self.clock = clock
        self._in_use = in_use
        self._lock_fd = lock_fd
        self.changing = asyncio.Lock()
        """Held by whoever publishes or removes, so that a collection sees no half of either."""
        self.images: dict[str, ImageRecord] = {}
        self.names: dict[str, NameRecord] = {}
        self.roots: dict[str, RootRecord] = {}
        self.cache: dict[str, CacheRecord] = {}
        self.held: Counter[str] = Counter()
        """Blobs (`sha256:…`), roots (`roots/KEY.erofs`) and partials (file names)."""
        self._given_out: dict[str, float] = {}
        self._fresh: dict[str, set[str]] = {}
        """Blobs that no image refers to yet, and the scopes that proved to have them."""
        self._unpacked: set[tuple[str, str]] = set()
        """Layers and their diff_ids, as the converter saw them; true for ever."""

    # --- opening ------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        clock: Callable[[], float] = time.time,
        in_use: Callable[[], Iterable[str]] = tuple,
    ) -> Store:
        """Takes the lock and finishes what a crash left. Blocks. Raises store_busy, state_too_new."""
        layout = Layout(directory)
        if not opening.make(layout):
            return cls(layout, -1, clock, in_use)
        lock = opening.take_lock(layout)
        store = cls(layout, lock, clock, in_use)
        try:
            opening.check_format(layout)
            opening.clear_tmp(layout, clock())
            found = opening.load(layout)
            store.images, store.names, store.roots, store.cache = found.images, found.names, found.roots, found.cache
            for image in found.images.values():
                store._unpacked.update((layer.digest, layer.diff_id) for layer in image.layers)
            if found.is_whole:
                store._remove_leftovers()
        except BaseException:
            store.close()
            raise
        return store

    def require_writable(self) -> None:
        """Raises `unsupported` where only prebuilt roots can be used."""
        if self._lock_fd < 0:
            raise error(
                "unsupported",
                f"This node may not write to its images directory {self.layout.root}; it has only prebuilt roots.",
                fix="Give the node a directory of its own: cloche up --images DIR",
            )

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _remove_leftovers(self) -> None:
        for key in [key for key, name in self.names.items() if name.digest not in self.images]:
            self.layout.name_file(key).unlink()
            del self.names[key]
        for key in self.unreferenced_roots():
            _unlink_root(self.layout, key)
            self.roots.pop(key, None)
        for name in self.unreferenced_blobs():
            (self.layout.blobs / name).unlink()
        here = {each.name for each in self.layout.blobs.iterdir()}
        for path in self.layout.partial.iterdir():
            if path.name[:64] in here:
                path.unlink()

    # --- what is here -------------------------------------------------------------------------------

    def has_blob(self, digest: str, scope: str) -> bool:
        """Whether that blob is here and this scope has shown that it may have it: a digest alone proves nothing."""
        if not self.layout.blob(digest).is_file():
            return False
        if {PUBLIC, scope} & self._fresh.get(digest, set()):
            return True
        if any((image.public or scope in image.owners) and digest in blobs_of(image) for image in self.images.values()):
            return True
        return any(step.scope == scope and digest in layers_of(step) for step in self.cache.values())

    def open_blob(self, digest: str) -> int:
        """A descriptor for reading. Raises image_corrupt when it is gone: fsck would say so."""
        try:
            return os.open(self.layout.blob(digest), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as gone:
            raise error("image_corrupt", f"The store has lost {digest}.", detail={"digest": digest}) from gone

    def read_blob(self, digest: str, bytes_max: int) -> bytes:
        """A small one: manifest, config, signature."""
        fd = self.open_blob(digest)
        with os.fdopen(fd, "rb") as file:
            data = file.read(bytes_max + 1)
        if len(data) > bytes_max:
            raise error("image_refused", f"{digest} is longer than {bytes_max} bytes.", detail={"reason": "too_large"})
        return data

    def has_root(self, key: str) -> bool:
        return key in self.roots and self.layout.root_file(key).is_file()

    def are_known(self, layers: Iterable[tuple[str, str]]) -> bool:
        """Whether the converter has seen each of these blobs unpack to its diff_id."""
        return self._unpacked.issuperset(layers)

    def find_name(self, owner: str | None, platform: str, name: str) -> ImageRecord | None:
        """What that name means to this owner: his own first."""
        for scope in {owner: None, PUBLIC: None} if owner is not None else {PUBLIC: None}:
            found = self.names.get(name_key(scope, platform, name))
            image = self.images.get(found.digest) if found is not None else None
            if image is not None and may_see(image, owner):
                return image
        return None

    def find_digest(self, owner: str | None, platform: str | None, digest: str) -> ImageRecord | None:
        """The image of that digest, or the one for this platform of that index."""
        image = self.images.get(digest)
        if image is not None and may_see(image, owner):
            return image
        for each in self.images.values():
            if digest in each.indexes and platform in (None, each.platform) and may_see(each, owner):
                return each
        return None

    def names_of(self, digest: str, owner: str | None, is_admin: bool = False) -> list[NameRecord]:
        found = [each for each in self.names.values() if each.digest == digest]
        return sorted(
            (each for each in found if is_admin or each.scope in (PUBLIC, owner)),
            key=lambda each: (each.name, each.scope),
        )

    def uses(self) -> Counter[str]:
        """Root files, each as often as a sandbox runs from it."""
        return Counter(self._in_use())

    def used_at(self, digest: str) -> float:
        return self.layout.image(digest).stat().st_mtime

    def mark_used(self, digest: str) -> None:
        now = self.clock()
        os.utime(self.layout.image(digest), (now, now))

    def mark_step(self, key: str) -> None:
        now = self.clock()
        os.utime(self.layout.cache_file(key), (now, now))

    # --- holds --------------------------------------------------------------------------------------

    @contextmanager
    def holding(self, things: Iterable[str]) -> Iterator[None]:
        held = list(things)
        self.held.update(held)
        try:
            yield
        finally:
            self.held.subtract(held)
            self.held = +self.held

    def give_out(self, key: str) -> None:
        """A sandbox is about to start from this root."""
        self._given_out[key] = self.clock()

    def taken(self, file: str) -> None:
        """Whom it was given out for holds it now."""
        self._given_out.pop(file.removeprefix("roots/").removesuffix(".erofs"), None)

    def is_held(self, thing: str) -> bool:
        return self.held[thing] > 0

    def is_image_busy(self, image: ImageRecord, uses: Counter[str]) -> bool:
        """Somebody works with it or runs from it. A blob that it shares with a busy one does not matter: that one has it too."""
        return self.is_held(image.digest) or (image.root is not None and self.is_root_busy(image.root, uses))

    def is_root_busy(self, key: str, uses: Counter[str] | None = None) -> bool:
        file = root_name(key)
        if self.is_held(file) or (self.uses() if uses is None else uses)[file]:
            return True
        given = self._given_out.get(key)
        if given is None:
            return False
        if 0 <= self.clock() - given < HANDOVER_S:
            return True
        del self._given_out[key]
        return False

    def prove(self, digest: str, scope: str) -> None:
        """This scope brought that blob's bytes."""
        self._fresh.setdefault(digest, set()).add(scope)

    # --- changes: the caller holds `changing` -------------------------------------------------------

    async def save_image(self, image: ImageRecord) -> None:
        points.reached("images.image.before_record")
        used = max(self.clock(), self.used_at(image.digest) if image.digest in self.images else 0.0)
        await finished(to_thread(write_record, self.layout.image(image.digest), image, self.layout.tmp, used))
        self.images[image.digest] = image
        self._unpacked.update((layer.digest, layer.diff_id) for layer in image.layers)
        for digest in blobs_of(image):
            self._fresh.pop(digest, None)
        points.reached("images.image.after_record")

    async def save_name(self, name: NameRecord) -> None:
        key = name_key(name.scope, name.platform, name.name)
        await finished(to_thread(write_record, self.layout.name_file(key), name, self.layout.tmp, self.clock()))
        self.names[key] = name
        points.reached("images.name.after_record")

    async def save_root(self, fd: int, root: RootRecord) -> None:
        """The file gets its name before its record."""
        await finished(to_thread(_publish_root, self.layout, fd, root, self.clock()))
        self.roots[root.key] = root
        points.reached("images.root.after_record")

    async def save_step(self, step: CacheRecord) -> None:
        key = cache_key(step.scope, step.key)
        await finished(to_thread(write_record, self.layout.cache_file(key), step, self.layout.tmp, self.clock()))
        self.cache[key] = step
        for digest in layers_of(step):
            self._fresh.pop(digest, None)

    async def drop_step(self, key: str) -> tuple[int, int]:
        """A step of a build is forgotten: how many blobs and bytes went with it."""
        step = self.cache.pop(key)
        freed = await finished(to_thread(unlink, self.layout.cache_file(key)))
        gone = {hex_of(each) for each in layers_of(step)} & set(self.unreferenced_blobs())
        for name in gone:
            freed += await self.remove_blob(name)
        return len(gone), freed

    async def drop_names(self, keys: Iterable[str]) -> int:
        """How many bytes that freed."""
        gone, freed = list(keys), 0
        for key in gone:
            freed += unlink(self.layout.name_file(key))
            self.names.pop(key, None)
        if gone:
            await finished(to_thread(sync_directory, self.layout.names))
        points.reached("images.remove.after_name")
        return freed

    async def remove_root(self, key: str) -> int:
        """How many bytes that freed."""
        self.roots.pop(key, None)
        return await finished(to_thread(_unlink_root, self.layout, key))

    async def remove_blob(self, name: str) -> int:
        self._fresh.pop(f"sha256:{name}", None)
        return await finished(to_thread(unlink, self.layout.blobs / name))

    async def remove_image(self, digest: str) -> tuple[int, int, int]:
        """Its record goes first: from then on it is gone, and a crash leaves only what the next start removes.

        How many blobs, roots and bytes went with it.
        """
        image = self.images.pop(digest)
        freed = unlink(self.layout.image(digest))
        await finished(to_thread(sync_directory, self.layout.images))
        points.reached("images.remove.after_image")
        freed += await self.drop_names([key for key, name in self.names.items() if name.digest == digest])
        blobs = roots = 0
        if image.root is not None and image.root in self.unreferenced_roots():
            freed, roots = freed + await self.remove_root(image.root), 1
        points.reached("images.remove.after_root")
        for name in {hex_of(each) for each in blobs_of(image)} & set(self.unreferenced_blobs()):
            freed, blobs = freed + await self.remove_blob(name), blobs + 1
        points.reached("images.remove.after_blobs")
        return blobs, roots, freed

    # --- what nobody needs --------------------------------------------------------------------------

    def unreferenced_roots(self) -> list[str]:
        """On the disk, of no image, not running, not held. Roots that an image would be given anew are of no image."""
        referred, uses = {image.root for image in self.images.values()}, self.uses()
        found = {path.stem for path in self.layout.roots.iterdir() if HEX.fullmatch(path.stem)}
        return sorted(key for key in found - referred if not self.is_root_busy(key, uses))

    def unreferenced_blobs(self) -> list[str]:
        referred = {hex_of(digest) for image in self.images.values() for digest in blobs_of(image)}
        referred |= {hex_of(digest) for step in self.cache.values() for digest in layers_of(step)}
        found = {path.name for path in self.layout.blobs.iterdir() if HEX.fullmatch(path.name)}
        return sorted(name for name in found - referred if not self.is_held(f"sha256:{name}"))

    def partials(self) -> list[Path]:
        """Downloads that stopped, oldest first."""
        found = [path for path in self.layout.partial.iterdir() if not self.is_held(path.name)]
        return sorted(found, key=lambda path: path.stat().st_mtime)

    def bytes(self) -> int:
        """Everything but the prebuilt roots."""
        if self._lock_fd < 0:
            return 0
        here = self.layout
        places = (here.blobs, here.roots, here.images, here.names, here.cache, here.partial)
        return sum(size_of(path) for place in places for path in place.iterdir())


def may_see(image: ImageRecord, owner: str | None) -> bool:
    """None is the node's administrator."""
    return owner is None or image.public or owner in image.owners


def blobs_of(image: ImageRecord) -> set[str]:
    return {
        image.digest,
        image.config,
        *image.indexes,
        *image.signatures,
        *(layer.digest for layer in image.layers),
    }


def layers_of(step: CacheRecord) -> set[str]:
    return {layer.digest for layer in step.layers}


def unlink(path: Path) -> int:
    """How many bytes that freed. Blocks."""
    freed = size_of(path)
    path.unlink(missing_ok=True)
    return freed


def _publish_root(layout: Layout, fd: int, root: RootRecord, at: float) -> None:
    points.reached("images.root.before_link")
    publish(fd, layout.root_file(root.key))
    points.reached("images.root.after_link")
    write_record(layout.root_record(root.key), root, layout.tmp, at, 0o444)


def _unlink_root(layout: Layout, key: str) -> int:
    return unlink(layout.root_file(key)) + unlink(layout.root_record(key))
