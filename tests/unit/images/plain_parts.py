"""Small parts to try the store with: a source in memory that can fail, and a converter that only concatenates.

Both keep count of what they were asked. What a converter really does is tested beside it, in other files.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import tarfile
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloche.wire.errors import error
from cloche_server.images.layout import Layout
from cloche_server.images.manifest import OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST, Descriptor
from cloche_server.images.pulling import Source
from cloche_server.images.reference import Reference, parse
from cloche_server.images.service import Images
from cloche_server.images.settings import RegistrySettings
from cloche_server.images.trust import TrustPolicy
from cloche_server.images.worker import Entry, LayerFile, RootMade
from tests.unit.images.pushing import gzipped, sha256, tar_of

HOST = "registry.example"


@dataclass
class Shown:
    """One image that the source has."""

    digest: str
    manifest: bytes
    config: bytes
    layers: list[bytes]


@dataclass
class MemoryRegistry:
    """Blobs and tags. `cut` and `gate` are for tests that interrupt it."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    cut: dict[str, int] = field(default_factory=dict)
    """A blob that breaks off after so many bytes, every time."""
    damaged: set[str] = field(default_factory=set)
    denied: Counter[str] = field(default_factory=Counter)
    """Blobs that are denied so many times."""
    gate: asyncio.Event | None = None
    """Layers wait for it."""
    piece_bytes: int = 16 * 1024
    open_sources: int = 0

    def add(
        self,
        name: str,
        layers: Sequence[bytes] | None = None,
        *,
        config: dict[str, Any] | None = None,
        architecture: str = "amd64",
        compress: bool = True,
    ) -> Shown:
        """An image by that name, of these tars."""
        layers = [tar_of({"hello": name.encode()})] if layers is None else layers
        packed = [gzipped(layer) if compress else layer for layer in layers]
        written = json.dumps(
            {
                "architecture": architecture,
                "os": "linux",
                "created": "2024-01-02T03:04:05Z",
                "config": {"Env": ["PATH=/bin", "A=b"], "Cmd": ["/hello"], "User": "7:8", **(config or {})},
                "rootfs": {"type": "layers", "diff_ids": [sha256(layer) for layer in layers]},
            }
        ).encode()
        kind = OCI_LAYER + ("+gzip" if compress else "")
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": OCI_MANIFEST,
                "config": {"mediaType": OCI_CONFIG, "digest": self.put(written), "size": len(written)},
                "layers": [{"mediaType": kind, "digest": self.put(each), "size": len(each)} for each in packed],
            }
        ).encode()
        digest = self.put(manifest, OCI_MANIFEST)
        self.tags[parse(name).name] = digest
        return Shown(digest, manifest, written, packed)

    def add_index(self, name: str, images: dict[str, Shown]) -> str:
        entries = [
            {
                "mediaType": OCI_MANIFEST,
                "digest": image.digest,
                "size": len(image.manifest),
                "platform": {"os": "linux", "architecture": architecture},
            }
            for architecture, image in images.items()
        ]
        index = json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}).encode()
        digest = self.put(index, OCI_INDEX)
        self.tags[parse(name).name] = digest
        return digest

    def put(self, data: bytes, kind: str = "") -> str:
        digest = sha256(data)
        self.blobs[digest] = data
        self.kinds[digest] = kind
        return digest

    def source(self, _: object = None) -> Source:
        self.open_sources += 1
        return MemorySource(self)


class MemorySource:
    """The registry to one pull."""

    def __init__(self, registry: MemoryRegistry) -> None:
        self._registry = registry
        self._closed = False

    async def resolve(self, ref: Reference) -> tuple[Descriptor, bytes]:
        here = self._registry
        here.asked["resolve"] += 1
        digest = ref.digest or here.tags.get(ref.name)
        if digest is None or digest not in here.blobs:
            raise error("image_not_found", f"no {ref.name}")
        data = here.blobs[digest]
        return Descriptor(here.kinds[digest], digest, len(data)), data

    async def manifest(self, ref: Reference, digest: str) -> tuple[str, bytes]:
        self._registry.asked["manifest"] += 1
        return self._registry.kinds[digest], self._registry.blobs[digest]

    async def blob(
        self, ref: Reference, descriptor: Descriptor, offset: int = 0, *, use_mirrors: bool = True
    ) -> AsyncGenerator[bytes, None]:
        here = self._registry
        here.asked[descriptor.digest] += 1
        data = here.blobs[descriptor.digest]
        if descriptor.digest in here.damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
        if here.gate is not None and descriptor.media_type.startswith(OCI_LAYER):
            await here.gate.wait()
        if here.denied[descriptor.digest]:
            here.denied[descriptor.digest] -= 1
            raise error("registry_denied", "not you")
        end = here.cut.get(descriptor.digest, len(data))
        for at in range(offset, end, here.piece_bytes):
            piece = data[at : min(end, at + here.piece_bytes)]
            here.sent_bytes += len(piece)
            assert not self._closed, "a source is not used after it was closed"
            yield piece
            await asyncio.sleep(0)
        if end < len(data):
            raise error("registry_unreachable", "cut")

    async def aclose(self) -> None:
        self._closed = True
        self._registry.open_sources -= 1


@dataclass
class PlainConverter:
    """Layers, one after the other, are the root. It checks what the real one checks first: digest, length, diff_id."""

    made: list[tuple[str, ...]] = field(default_factory=list)
    gate: asyncio.Event | None = None
    running: int = 0

    async def image(
        self,
        layers: Sequence[LayerFile],
        output: int,
        scratch: int,
        agent: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> RootMade:
        self.made.append(tuple(layer.diff_id for layer in layers))
        self.running += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
            return self._image(layers, output, agent)
        finally:
            self.running -= 1

    def _image(self, layers: Sequence[LayerFile], output: int, agent: int) -> RootMade:
        whole = b"ROOT" + hashlib.sha256(os.pread(agent, 1 << 20, 0)).digest()
        for number, layer in enumerate(layers):
            packed = os.pread(layer.fd, layer.size + 1, 0)
            if sha256(packed) != layer.digest or len(packed) != layer.size:
                raise error("image_corrupt", "digest", detail={"reason": "bad_digest", "layer": number})
            raw = gzip.decompress(packed) if layer.compression == "gzip" else packed
            if sha256(raw) != layer.diff_id:
                raise error("image_corrupt", "diff_id", detail={"reason": "bad_digest", "layer": number})
            if b"EVIL" in raw:
                raise error("image_refused", "evil", detail={"reason": "bad_name", "layer": number})
            whole += raw
        os.write(output, whole)
        lost = {"xattrs": 2, "xattr_examples": ["bin/ping: security.capability"], "sockets": 0, "devices": 0}
        return RootMade(len(whole), hashlib.sha256(whole).hexdigest(), len(layers), len(whole), lost)

    async def index(self, source: int, output: int) -> list[Entry]:
        """Of archives that the tests made themselves."""
        found = []
        os.lseek(source, 0, os.SEEK_SET)
        with os.fdopen(os.dup(source), "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            kinds = {
                tarfile.REGTYPE: "file",
                tarfile.DIRTYPE: "dir",
                tarfile.SYMTYPE: "symlink",
                tarfile.LNKTYPE: "hardlink",
            }
            for member in tar:
                kind = kinds[member.type]
                found.append(
                    Entry(
                        path=os.path.normpath(member.name),
                        type=kind,
                        mode=member.mode,
                        uid=member.uid,
                        gid=member.gid,
                        mtime=float(member.mtime),
                        size=member.size if kind == "file" else 0,
                        offset=member.offset_data,
                        link=member.linkname or None,
                        sha256=None,
                    )
                )
        return found


class Clock:
    """Time that passes when the test says so."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


async def open_images(
    directory: Path,
    registry: MemoryRegistry | None = None,
    converter: PlainConverter | None = None,
    *,
    in_use: Callable[[], Iterable[str]] = tuple,
    agent: bytes = b"agent",
    version: str = "1",
    trust: TrustPolicy | None = None,
    clock: Callable[[], float] | None = None,
) -> Images:
    """The whole room on these parts, in `directory`/images."""
    agent_file = directory / "agent"
    agent_file.write_bytes(agent)
    more = {} if clock is None else {"clock": clock}
    return await Images.open(
        directory / "images",
        settings=RegistrySettings(),
        converter=converter or PlainConverter(),
        converter_version=version,
        agent=agent_file,
        in_use=in_use,
        trust=trust,
        sources=(registry or MemoryRegistry()).source,
        **more,
    )


def left_in_tmp(directory: Path) -> list[str]:
    """Everything unfinished, as paths below tmp/."""
    tmp = Layout(directory / "images").tmp
    return sorted(str(path.relative_to(tmp)) for path in tmp.rglob("*") if path.name != "partial")


async def pieces(data: bytes, size: int = 10_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def tar_with(
    files: dict[str, bytes], links: dict[str, str] | None = None, again: dict[str, bytes] | None = None
) -> bytes:
    """`again` are files by names that are there already."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in (*files.items(), *(again or {}).items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return buffer.getvalue()
