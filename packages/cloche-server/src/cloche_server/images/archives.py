"""Archives: an OCI layout or a `docker save` in a tar becomes images; an image becomes an OCI layout in a tar.

What is uploaded goes to a file without a name, and only the converter's process looks at its structure: it says where in the
file each entry's bytes are. From there blobs are copied by their place and checked against their digests. Of names in the
archive only those are used that a manifest asks for; none of them becomes a path here.
"""

from __future__ import annotations

import os
import posixpath
import tarfile
from asyncio import to_thread
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from cloche.wire.errors import ClocheError, error
from cloche_server import points
from cloche_server.images import blobs
from cloche_server.images.bringing import Bringer, Hold, bringing, canonical, manifest_bytes
from cloche_server.images.flights import finished
from cloche_server.images.layout import ImageRecord, digest_of, hex_of
from cloche_server.images.manifest import (
    CONFIG_BYTES_MAX,
    INDEXES,
    MANIFEST_BYTES_MAX,
    OCI_INDEX,
    OCI_LAYER,
    Descriptor,
    Index,
    IndexEntry,
    Manifest,
    choose,
    host_platform,
    parse_config,
    parse_manifest,
)
from cloche_server.images.reference import Reference, parse, shown
from cloche_server.images.roots import Say
from cloche_server.images.store import Store, blobs_of
from cloche_server.images.strict import refused, strict_json
from cloche_server.images.worker import Entry

UPLOAD_BYTES_MAX: Final = 64 * 1024 * 1024 * 1024
IMAGES_MAX: Final = 64
SPACE_EVERY_BYTES: Final = 64 * 1024 * 1024
LINKS_MAX: Final = 4
CHUNK_BYTES: Final = 1024 * 1024
NAME_ANNOTATIONS: Final = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
MAGIC: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


class Indexer(Protocol):
    """`worker.Converter`, as far as archives ask it."""

    async def index(self, source: int, output: int) -> list[Entry]: ...


@dataclass(frozen=True)
class Archive:
    """An upload and where its entries are."""

    fd: int
    entries: dict[str, Entry]

    def find(self, path: str) -> Entry:
        """The file by that name, through links within the archive."""
        for _ in range(LINKS_MAX):
            entry = self.entries.get(path)
            if entry is None:
                raise refused("missing_entry", f"The archive has no {shown(path)}.")
            if entry.type == "file":
                return entry
            if entry.type == "symlink" and entry.link is not None:
                path = posixpath.normpath(posixpath.join(posixpath.dirname(path), entry.link))
            elif entry.type == "hardlink" and entry.link is not None:
                path = entry.link
            else:
                break
        raise refused("bad_entry", f"{shown(path)} in the archive is not a file.")

    def read(self, path: str, bytes_max: int) -> bytes:
        entry = self.find(path)
        if entry.size > bytes_max:
            raise refused("too_large", f"{shown(path)} in the archive is longer than {bytes_max} bytes.")
        data = os.pread(self.fd, entry.size, entry.offset)
        if len(data) != entry.size:
            raise error("image_corrupt", f"The archive ends before {shown(path)}.")
        return data

    def compression(self, entry: Entry) -> str:
        start = os.pread(self.fd, 4, entry.offset)
        return next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), "none")


@dataclass(frozen=True)
class Naming:
    """What images of an archive are called: as the caller says; or else as the archive does, unless nobody trusts it with that."""

    name: Reference | None = None
    """For an archive with one image."""
    is_one: bool = False
    """It must have one image, and names of its own mean nothing: it is a guest's."""

    def check(self, count: int) -> None:
        if not count:
            raise error("image_not_found", f"The archive has no image for {host_platform()}.")
        if count > IMAGES_MAX:
            raise refused("too_many_images", f"The archive has more than {IMAGES_MAX} images.")
        if self.is_one and count > 1:
            raise refused("too_many_images", f"The archive has {count} images, not one.")
        if self.name is not None and count > 1:
            raise error("invalid_request", f"The archive has {count} images; a name is for one.")

    def refs(self, said: Sequence[str]) -> list[Reference]:
        if self.name is not None:
            return [self.name]
        return [] if self.is_one else [ref for each in said for ref in _ref(each)]


class Archives:
    """Imports for one store."""

    def __init__(self, store: Store, bringer: Bringer, indexer: Indexer) -> None:
        self._store = store
        self._bringer = bringer
        self._indexer = indexer

    async def take(
        self, data: AsyncIterator[bytes], *, owner: str, naming: Naming, say: Say, bytes_max: int
    ) -> list[ImageRecord]:
        """Every image of the archive that this machine can run."""
        upload, listing = self._store.layout.scratch(), self._store.layout.scratch(0o666)
        try:
            await receive(upload, data, bytes_max)
            points.reached("images.import.received")
            entries = await self._indexer.index(upload, listing)
            points.reached("images.import.indexed")
            archive = Archive(upload, _by_path(entries))
            async with bringing(self._store) as hold:
                if "index.json" in archive.entries and "oci-layout" in archive.entries:
                    return await self._layout(archive, owner, naming, say, hold)
                if "manifest.json" in archive.entries:
                    return await self._docker_save(archive, owner, naming, say, hold)
            raise refused("unknown_archive", "This is neither an OCI layout nor the archive of `docker save`.")
        finally:
            os.close(upload)
            os.close(listing)

    # --- OCI layout ---------------------------------------------------------------------------------

    async def _layout(self, archive: Archive, owner: str, naming: Naming, say: Say, hold: Hold) -> list[ImageRecord]:
        if strict_json(archive.read("oci-layout", 4096), 4096, "layout").get("imageLayoutVersion") != "1.0.0":
            raise refused("unsupported_layout", "Only version 1.0.0 of the OCI layout is supported.")
        data = archive.read("index.json", MANIFEST_BYTES_MAX)
        index = parse_manifest(data, OCI_INDEX)
        assert isinstance(index, Index), "it was parsed as one"
        names = _annotated(data)
        wanted = [(entry, names[at]) for at, entry in enumerate(index.manifests) if _is_for_us(entry)]
        naming.check(len(wanted))
        found = []
        for entry, said in wanted:
            refs = naming.refs([] if said is None else [said])
            found.append(await self._one(archive, entry, owner, refs, say, hold))
        return found

    async def _one(
        self, archive: Archive, entry: IndexEntry, owner: str, refs: Sequence[Reference], say: Say, hold: Hold
    ) -> ImageRecord:
        data, indexes = self._blob_bytes(archive, entry), []
        found = parse_manifest(data, entry.media_type)
        if isinstance(found, Index):
            indexes.append(data)
            inner = choose(found, host_platform())
            data = self._blob_bytes(archive, inner)
            found = parse_manifest(data, inner.media_type)
        if not isinstance(found, Manifest):
            raise refused("nested_index", "The index names an index that names another.")
        for each in (found.config, *found.layers):
            hold(each.digest)
            place = archive.find(f"blobs/sha256/{hex_of(each.digest)}")
            if place.size != each.size:
                raise error("image_corrupt", f"{each.digest} has {place.size} bytes, not {each.size}.")
            if not self._store.has_blob(each.digest, owner):
                await blobs.copy_range(self._store, archive.fd, place.offset, place.size, owner, each.digest)
        return await self._bringer.adopt(
            data, found.media_type, owner=owner, refs=refs, source="archive", say=say, hold=hold, indexes=indexes
        )

    def _blob_bytes(self, archive: Archive, what: Descriptor) -> bytes:
        data = archive.read(f"blobs/sha256/{hex_of(what.digest)}", MANIFEST_BYTES_MAX)
        if digest_of(data) != what.digest:
            raise error("image_corrupt", f"{what.digest} in the archive has another hash.")
        return data

    # --- docker save --------------------------------------------------------------------------------

    async def _docker_save(
        self, archive: Archive, owner: str, naming: Naming, say: Say, hold: Hold
    ) -> list[ImageRecord]:
        listed = b'{"images":' + archive.read("manifest.json", MANIFEST_BYTES_MAX) + b"}"
        images = strict_json(listed, len(listed), "manifest").get("images")
        if not isinstance(images, list) or not all(isinstance(image, dict) for image in images):
            raise refused("bad_manifest", "manifest.json of the archive is not a list of tables.")
        naming.check(len(images))
        found = []
        for image in images:
            refs = naming.refs(_texts(image, "RepoTags"))
            found.append(await self._saved(archive, image, owner, refs, say, hold))
        return found

    async def _saved(
        self, archive: Archive, image: dict[str, Any], owner: str, refs: Sequence[Reference], say: Say, hold: Hold
    ) -> ImageRecord:
        path = image.get("Config")
        if not isinstance(path, str):
            raise refused("bad_manifest", "An image of the archive names no config.")
        config = archive.read(posixpath.normpath(path), CONFIG_BYTES_MAX)
        diff_ids = parse_config(config).diff_ids
        paths = _texts(image, "Layers")
        if len(paths) != len(diff_ids):
            raise refused("layer_count", f"The archive has {len(paths)} layers, the config {len(diff_ids)}.")
        hold(digest_of(config))
        await blobs.put_bytes(self._store, config, owner)
        layers = []
        for each, diff_id in zip(paths, diff_ids, strict=True):
            place = archive.find(posixpath.normpath(each))
            kind = archive.compression(place)
            expected = diff_id if kind == "none" else None
            if expected is not None:
                hold(expected)
            if expected is None or not self._store.has_blob(expected, owner):
                digest = await blobs.copy_range(
                    self._store, archive.fd, place.offset, place.size, owner, expected, hold=hold
                )
            else:
                digest = expected
            layers.append((OCI_LAYER if kind == "none" else f"{OCI_LAYER}+{kind}", digest, place.size))
        data = manifest_bytes(config, layers)
        return await self._bringer.adopt(data, "", owner=owner, refs=refs, source="archive", say=say, hold=hold)


async def receive(fd: int, data: AsyncIterator[bytes], bytes_max: int) -> int:
    """An upload into a file; too_large beyond the limit, no_space before the disk is full."""
    received, looked_at = 0, -SPACE_EVERY_BYTES
    batch: list[bytes] = []
    waiting = 0

    def write(pieces: list[bytes]) -> None:
        view = memoryview(b"".join(pieces))
        while view:
            view = view[os.write(fd, view) :]

    async for piece in data:
        received += len(piece)
        if received > bytes_max:
            raise error("too_large", f"The archive has more than {bytes_max} bytes.")
        if received - looked_at >= SPACE_EVERY_BYTES:
            blobs.check_space(fd, SPACE_EVERY_BYTES)
            looked_at = received
        batch.append(piece)
        waiting += len(piece)
        if waiting >= CHUNK_BYTES:
            await finished(to_thread(write, batch))
            batch, waiting = [], 0
    await finished(to_thread(write, batch))
    return received


# --- export ---------------------------------------------------------------------------------------


async def export(store: Store, image: ImageRecord, name: str | None) -> AsyncIterator[bytes]:
    """An OCI layout as a tar: the same bytes each time."""
    with store.holding(blobs_of(image)):
        system, architecture, *variant = image.platform.split("/")
        entry: dict[str, Any] = {
            "mediaType": image.media_type,
            "digest": image.digest,
            "size": image.size,
            "platform": {"os": system, "architecture": architecture, **({"variant": variant[0]} if variant else {})},
        }
        if name is not None:
            entry["annotations"] = {
                NAME_ANNOTATIONS[0]: name,
                NAME_ANNOTATIONS[1]: parse(name).tag or "latest",
            }
        index = canonical({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]})
        yield _file("oci-layout", canonical({"imageLayoutVersion": "1.0.0"}))
        yield _file("index.json", index)
        yield _header("blobs", 0, tarfile.DIRTYPE) + _header("blobs/sha256", 0, tarfile.DIRTYPE)
        for digest in sorted({image.digest, image.config, *(layer.digest for layer in image.layers)}):
            fd = store.open_blob(digest)
            try:
                size = os.fstat(fd).st_size
                yield _header(f"blobs/sha256/{hex_of(digest)}", size)
                at = 0
                while at < size:
                    data = await to_thread(os.pread, fd, CHUNK_BYTES, at)
                    if not data:
                        raise error("image_corrupt", f"The store has lost the end of {digest}.")
                    at += len(data)
                    yield data
                yield _padding(size)
            finally:
                os.close(fd)
        yield bytes(2 * tarfile.BLOCKSIZE)


def _file(name: str, data: bytes) -> bytes:
    return _header(name, len(data)) + data + _padding(len(data))


def _header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size, entry.type, entry.mode = size, kind, 0o644 if kind == tarfile.REGTYPE else 0o755
    return entry.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


# --- what an archive says -------------------------------------------------------------------------


def _by_path(entries: Sequence[Entry]) -> dict[str, Entry]:
    """Two files by one name could be two images to two readers."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.type == "dir":
            continue
        if entry.path in found:
            raise refused("duplicate_entry", f"{shown(entry.path)} is in the archive twice.")
        found[entry.path] = entry
    return found


def _is_for_us(entry: IndexEntry) -> bool:
    """Not an attestation, and not of another platform; an index is looked into."""
    if entry.platform is None or entry.media_type in INDEXES:
        return True
    host = host_platform()
    return (entry.platform.os, entry.platform.architecture) == (host.os, host.architecture)


def _annotated(data: bytes) -> list[str | None]:
    """What each entry of an index is called; entries were checked before."""
    found: list[str | None] = []
    for entry in strict_json(data, MANIFEST_BYTES_MAX, "manifest")["manifests"]:
        said = entry.get("annotations")
        texts = [said.get(each) for each in NAME_ANNOTATIONS] if isinstance(said, dict) else []
        found.append(next((text for text in texts if isinstance(text, str)), None))
    return found


def _ref(said: str) -> list[Reference]:
    """An archive's name, when it is a whole one and not only a tag."""
    if not (":" in said or "/" in said):
        return []
    try:
        ref = parse(said)
    except ClocheError:
        return []  # a name that is none leaves the image without one
    return [] if ref.digest is not None else [ref]


def _texts(table: dict[str, Any], key: str) -> list[str]:
    value = table.get(key)
    value = [] if value is None else value
    if not isinstance(value, list) or len(value) > IMAGES_MAX * 2 or not all(isinstance(each, str) for each in value):
        raise refused("bad_manifest", f"{key} in manifest.json of the archive is not a short list of texts.")
    return value
