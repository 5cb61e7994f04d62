"""Proves the store whole: every hash, every reference, every mode; nothing that belongs to nobody.

`repair` removes what is broken and what refers to it; an image that lost a blob goes, one that lost its root gets a new
one when it is next used. Files beside the store's own places are only named: they may be somebody's.
"""

from __future__ import annotations

import os
import stat
from asyncio import to_thread
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from cloche.wire.errors import ClocheError
from cloche.wire.images import FsckProblem, FsckReport
from cloche_server.images.flights import finished
from cloche_server.images.layout import (
    HEX,
    CacheRecord,
    ImageRecord,
    NameRecord,
    RecordT,
    RootRecord,
    cache_key,
    hex_of,
    name_key,
    read_record,
    sha256_file,
    size_of,
)
from cloche_server.images.manifest import MANIFEST_BYTES_MAX, Manifest, parse_manifest
from cloche_server.images.opening import is_partial, remove_tree
from cloche_server.images.prebuilt import NAME
from cloche_server.images.store import Store, blobs_of, layers_of, unlink

OWN_PLACES: Final = ("lock", "format", "blobs", "roots", "images", "names", "cache", "tmp")

Repair = Callable[[], Awaitable[object]]


@dataclass
class _Found:
    problems: list[FsckProblem] = field(default_factory=list)
    repairs: list[tuple[FsckProblem, Repair]] = field(default_factory=list)


class Fsck:
    """One check of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._layout = store.layout
        self._found = _Found()
        self._bytes = 0
        self._bad_blobs: set[str] = set()

    async def run(self, repair: bool) -> FsckReport:
        store = self._store
        async with store.changing:
            self._look_at_places()
            self._look_at_files()
            self._look_at_records()
            self._look_at_references()
            blobs = self._files(self._layout.blobs)
            roots = [path for path in self._files(self._layout.roots) if path.suffix == ".erofs"]
        for path in blobs:
            await self._hash_blob(path)
        for path in roots:
            await self._hash_root(path)
        async with store.changing:
            self._look_at_broken_images()
            if repair:
                for problem, mend in self._found.repairs:
                    await mend()
                    problem.repaired = True
        return FsckReport(
            blobs=len(blobs),
            roots=len(roots),
            images=len(store.images),
            bytes=self._bytes,
            problems=self._found.problems,
        )

    def _add(self, path: Path, what: str, repair: Repair | None = None) -> None:
        problem = FsckProblem(path=str(path.relative_to(self._layout.root)), what=what)
        self._found.problems.append(problem)
        if repair is not None:
            self._found.repairs.append((problem, repair))

    def _gone(self, path: Path) -> Repair:
        return lambda: finished(to_thread(remove_tree, path))

    # --- places and modes ---------------------------------------------------------------------------

    def _look_at_places(self) -> None:
        here = self._layout
        for path in here.root.iterdir():
            is_prebuilt = path.suffix in (".erofs", ".json") and NAME.fullmatch(path.stem) and path.is_file()
            if path.name not in OWN_PLACES and not is_prebuilt:
                self._add(path, "not a part of the store")
        closed = (here.root / "blobs", here.blobs, here.images, here.names, here.cache, here.tmp, here.partial)
        for place, mode in (*((place, 0o700) for place in closed), (here.roots, 0o711)):
            self._check_mode(place, mode)
        for path in (here.root / "blobs").iterdir():
            if path != here.blobs:
                self._add(path, "not a part of the store", self._gone(path))
        for path in here.tmp.iterdir():
            if path != here.partial:
                self._add(path, "left over from something unfinished", self._gone(path))
        for path in here.partial.iterdir():
            if not is_partial(path):
                self._add(path, "not a partial download", self._gone(path))

    def _look_at_files(self) -> None:
        here = self._layout
        for place, suffixes, mode in (
            (here.blobs, ("",), 0o444),
            (here.roots, (".erofs", ".json"), 0o444),
            (here.images, (".json",), 0o600),
            (here.names, (".json",), 0o600),
            (here.cache, (".json",), 0o600),
        ):
            for path in place.iterdir():
                if not HEX.fullmatch(path.stem) or path.suffix not in suffixes or not _is_file(path):
                    self._add(path, "not a part of the store", self._gone(path))
                else:
                    self._bytes += size_of(path)
                    self._check_mode(path, mode)

    def _check_mode(self, path: Path, mode: int) -> None:
        found = stat.S_IMODE(path.lstat().st_mode)
        if found != mode:

            def mend() -> None:
                with suppress(FileNotFoundError):  # another repair removed it
                    os.chmod(path, mode)

            self._add(path, f"its mode is {found:04o}, not {mode:04o}", lambda: finished(to_thread(mend)))

    def _files(self, place: Path) -> list[Path]:
        return sorted(path for path in place.iterdir() if HEX.fullmatch(path.stem) and _is_file(path))

    # --- records ------------------------------------------------------------------------------------

    def _look_at_records(self) -> None:
        here = self._layout
        for path in self._files(here.images):
            image = self._read(path, ImageRecord)
            if image is not None and hex_of(image.digest) != path.stem:
                self._add(path, "it describes another image", self._gone(path))
        for path in self._files(here.names):
            name = self._read(path, NameRecord)
            if name is not None and name_key(name.scope, name.platform, name.name) != path.stem:
                self._add(path, "it is the record of another name", self._gone(path))
            elif name is not None and not here.image(name.digest).is_file():
                self._add(path, f"it names an image that is not here: {name.digest}", self._drop_name(path.stem))
        for path in self._files(here.cache):
            step = self._read(path, CacheRecord)
            if step is not None and cache_key(step.scope, step.key) != path.stem:
                self._add(path, "it is the record of another step", self._gone(path))
        for path in self._files(here.roots):
            if path.suffix == ".json":
                root = self._read(path, RootRecord)
                if root is not None and (root.key != path.stem or not path.with_suffix(".erofs").is_file()):
                    self._add(path, "it describes a root that is not here", self._gone(path))
            elif not path.with_suffix(".json").is_file():
                self._add(path, "nothing is known of this root", self._rootless(path.stem))

    def _read(self, path: Path, kind: type[RecordT]) -> RecordT | None:
        try:
            return read_record(path, kind)
        except msgspec.DecodeError as bad:
            self._add(path, f"it cannot be read: {bad}", self._forget(path))
            return None

    def _forget(self, path: Path) -> Repair:
        """A record that cannot be read, and what the node remembers of it."""

        async def mend() -> None:
            store, digest = self._store, f"sha256:{path.stem}"
            if path.parent == self._layout.images and digest in store.images:
                await store.remove_image(digest)
            elif path.parent == self._layout.images:
                await store.drop_names([key for key, name in store.names.items() if name.digest == digest])
            await finished(to_thread(unlink, path))
            for place, known in (
                (self._layout.names, store.names),
                (self._layout.cache, store.cache),
                (self._layout.roots, store.roots),
            ):
                if path.parent == place:
                    known.pop(path.stem, None)

        return mend

    # --- references ---------------------------------------------------------------------------------

    def _look_at_references(self) -> None:
        store, here = self._store, self._layout
        for image in store.images.values():
            if not here.image(image.digest).is_file():
                self._add(here.image(image.digest), "the record is gone", self._drop_image(image.digest))
            for digest, size in _sizes(image).items():
                path = here.blob(digest)
                if not path.is_file():
                    self._bad_blobs.add(digest)
                    self._add(path, f"missing; image {image.digest} needs it", self._drop_image(image.digest))
                elif size is not None and size_of(path) != size:
                    self._bad_blobs.add(digest)
                    self._add(path, f"it has {size_of(path)} bytes, not {size}", self._drop_blob(path.name))
            if image.root is not None and not here.root_file(image.root).is_file():
                self._add(
                    here.root_file(image.root), f"missing; image {image.digest} has it", self._rootless(image.root)
                )
            self._look_at_manifest(image)
        for key, step in list(store.cache.items()):
            if any(not here.blob(digest).is_file() for digest in layers_of(step)):
                self._add(here.cache_file(key), "a layer of this step is missing", self._drop_step(key))
        for name in store.unreferenced_blobs():
            self._add(here.blobs / name, "nothing refers to it", self._drop_blob(name))
        for key in store.unreferenced_roots():
            if key in store.roots and not store.roots[key].diff_ids:
                continue  # the empty one, for builds from scratch: it stays until a collection
            self._add(here.roots / f"{key}.erofs", "nothing refers to it", self._drop_root(key))

    def _look_at_manifest(self, image: ImageRecord) -> None:
        """The record says what the manifest says."""
        path = self._layout.image(image.digest)
        if image.digest in self._bad_blobs:
            return
        try:
            manifest = parse_manifest(self._store.read_blob(image.digest, MANIFEST_BYTES_MAX), image.media_type)
        except ClocheError as bad:
            self._add(path, f"its manifest is none: {bad.message}", self._drop_image(image.digest))
            return
        said = [(layer.digest, layer.size, layer.compression) for layer in image.layers]
        if (
            not isinstance(manifest, Manifest)
            or manifest.config.digest != image.config
            or [(layer.digest, layer.size, layer.compression) for layer in manifest.layers] != said
        ):
            self._add(path, "it says something else than its manifest", self._drop_image(image.digest))

    def _look_at_broken_images(self) -> None:
        for image in list(self._store.images.values()):
            bad = blobs_of(image) & self._bad_blobs
            if bad:
                self._add(
                    self._layout.image(image.digest),
                    f"damaged: {', '.join(sorted(bad))}",
                    self._drop_image(image.digest),
                )

    # --- hashes -------------------------------------------------------------------------------------

    async def _hash_blob(self, path: Path) -> None:
        try:
            found = await to_thread(sha256_file, path)
        except FileNotFoundError:
            return  # removed while we looked
        if found != path.name:
            self._bad_blobs.add(f"sha256:{path.name}")
            self._add(path, "its content has another hash", self._drop_blob(path.name))

    async def _hash_root(self, path: Path) -> None:
        known = self._store.roots.get(path.stem)
        if known is None:
            return
        try:
            size, found = size_of(path), await to_thread(sha256_file, path)
        except FileNotFoundError:
            return  # removed while we looked
        if (size, found) != (known.root_bytes, known.root_sha256):
            self._add(path, "its content has another hash", self._rootless(path.stem))

    # --- repairs ------------------------------------------------------------------------------------

    def _drop_blob(self, name: str) -> Repair:
        return lambda: self._store.remove_blob(name)

    def _drop_root(self, key: str) -> Repair:
        return lambda: self._store.remove_root(key)

    def _drop_name(self, key: str) -> Repair:
        return lambda: self._store.drop_names([key])

    def _drop_step(self, key: str) -> Repair:
        async def mend() -> None:
            if key in self._store.cache:
                await self._store.drop_step(key)

        return mend

    def _drop_image(self, digest: str) -> Repair:
        async def mend() -> None:
            if digest in self._store.images:
                await self._store.remove_image(digest)

        return mend

    def _rootless(self, key: str) -> Repair:
        """It is made anew from the blobs when somebody wants it."""

        async def mend() -> None:
            await self._store.remove_root(key)
            for image in list(self._store.images.values()):
                if image.root == key:
                    await self._store.save_image(msgspec.structs.replace(image, root=None))

        return mend


def _sizes(image: ImageRecord) -> dict[str, int | None]:
    sizes: dict[str, int | None] = dict.fromkeys(blobs_of(image))
    sizes[image.digest], sizes[image.config] = image.size, image.config_size
    return sizes | {layer.digest: layer.size for layer in image.layers}


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)
