"""One pull: resolve the name, fetch what is missing, make the root, publish. Everything that a source says is hostile.

Nothing of it can be seen before all of it is there and right. What a pull that fails leaves are partial downloads, for the next
one to go on from. Whether a blob that is here may be used without fetching it is asked by scope: see
`Store.has_blob`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from cloche.wire.errors import ClocheError, error
from cloche.wire.images import ImageEvent
from cloche_server import points
from cloche_server.images import blobs
from cloche_server.images.flights import Flights, finished
from cloche_server.images.layout import PUBLIC, ImageRecord, digest_of, hex_of
from cloche_server.images.manifest import (
    Descriptor,
    ImageConfig,
    Index,
    Manifest,
    check_pair,
    choose,
    matches,
    parse_config,
    parse_manifest,
)
from cloche_server.images.publishing import layers_of, publish
from cloche_server.images.reference import Reference, shown
from cloche_server.images.roots import Roots, Say
from cloche_server.images.store import Store

LAYERS_AT_ONCE: Final = 3
SAY_EVERY_S: Final = 0.1
SOMEBODY_ELSES: Final = ("registry_denied", "registry_unreachable", "image_not_found")
"""Failures of a download that was another caller's: with one's own credentials it may go better."""


UNUSABLE: Final = ("image_refused", "image_too_large", "image_corrupt", "image_not_found")
"""Failures after which nobody will go on with what was fetched."""


class Source(Protocol):
    """Where an image comes from: `registry.Registry`, or an archive."""

    async def resolve(self, ref: Reference) -> tuple[Descriptor, bytes]: ...
    async def manifest(self, ref: Reference, digest: str) -> tuple[str, bytes]: ...
    def blob(
        self, ref: Reference, descriptor: Descriptor, offset: int = 0, *, use_mirrors: bool = True
    ) -> AsyncGenerator[bytes, None]: ...
    def aclose(self) -> Coroutine[Any, Any, None]: ...


@dataclass(frozen=True)
class Signed:
    """Who signed an image, and the blobs that say so."""

    by: tuple[str, ...] = ()
    blobs: tuple[bytes, ...] = ()


Checker = Callable[[Reference, Sequence[str], Source], Awaitable[Signed]]
"""Asks for the signatures that the node's policy requires of one of these digests; raises when they are not there."""


@dataclass(frozen=True)
class Resolved:
    """A manifest that was chosen, and how."""

    descriptor: Descriptor
    data: bytes
    manifest: Manifest
    index: bytes | None


class Lent:
    """A source that several downloads use; closed by the last."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._borrowers = 1

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[None]:
        assert self._borrowers, "it is closed"
        self._borrowers += 1
        try:
            yield
        finally:
            await self.close()

    async def close(self) -> None:
        self._borrowers -= 1
        if not self._borrowers:
            await finished(self.source.aclose())


class Pulls:
    """Fetches images into the store."""

    def __init__(self, store: Store, roots: Roots, check: Checker) -> None:
        self._store = store
        self._roots = roots
        self._check = check
        self._downloads: Flights[int, None] = Flights()

    async def close(self) -> None:
        await self._downloads.close()

    async def pull(self, ref: Reference, platform: str, scope: str, source: Source, say: Say) -> ImageRecord:
        """The image by that name for that platform. It is in the store, with its root, when this returns.

        The source is closed when nobody needs it any more: a download that others joined may outlive this pull.
        """
        lent = Lent(source)
        try:
            resolved = await resolve(ref, platform, source)
            points.reached("images.pull.resolved")
            say(ImageEvent(kind="resolved", image=ref.familiar, digest=resolved.descriptor.digest))
            tops = [resolved.descriptor.digest, *([digest_of(resolved.index)] if resolved.index is not None else [])]
            signed = await self._check(ref, tops, source)
            return await self._bring(ref, platform, scope, lent, resolved, signed, say)
        finally:
            await lent.close()

    async def _bring(
        self, ref: Reference, platform: str, scope: str, lent: Lent, resolved: Resolved, signed: Signed, say: Say
    ) -> ImageRecord:
        with ExitStack() as held:
            put: set[str] = set()
            try:
                return await self._take(ref, platform, scope, lent, resolved, signed, say, held, put)
            except ClocheError as failed:
                if failed.code in UNUSABLE:
                    blobs.forget_partials(self._store, put, scope)
                raise
            finally:
                held.close()
                await finished(self._tidy(put))

    async def _take(
        self,
        ref: Reference,
        platform: str,
        scope: str,
        lent: Lent,
        resolved: Resolved,
        signed: Signed,
        say: Say,
        held: ExitStack,
        put: set[str],
    ) -> ImageRecord:
        store, manifest = self._store, resolved.manifest

        def hold(digest: str) -> None:
            put.add(digest)
            held.enter_context(store.holding([digest]))

        tops = [resolved.data, *([resolved.index] if resolved.index is not None else []), *signed.blobs]
        for data in tops:
            hold(digest_of(data))
            await blobs.put_bytes(store, data, scope)
        for each in (manifest.config, *manifest.layers):
            hold(each.digest)
        config = await self._config(ref, platform, scope, lent, manifest)
        layers = layers_of(manifest, config)
        held.enter_context(store.holding([self._roots.file_of(layers)]))
        await self._fetch_layers(ref, scope, lent, manifest, say)
        root = await self._roots.ensure(layers, say)
        record = ImageRecord(
            digest=resolved.descriptor.digest,
            media_type=manifest.media_type,
            size=len(resolved.data),
            platform=platform,
            source="registry",
            config=manifest.config.digest,
            config_size=manifest.config.size,
            layers=layers,
            root=root,
            indexes=[] if resolved.index is None else [digest_of(resolved.index)],
            public=scope == PUBLIC,
            owners=[] if scope == PUBLIC else [scope],
            signatures=[digest_of(data) for data in signed.blobs],
            signed_by=list(signed.by),
            created=config.created,
            added_at=store.clock(),
        )
        return await publish(store, record, [ref.name], scope)

    async def _config(self, ref: Reference, platform: str, scope: str, lent: Lent, manifest: Manifest) -> ImageConfig:
        await self._fetch(ref, manifest.config, scope, lent, _nothing)
        config = parse_config(self._store.read_blob(manifest.config.digest, manifest.config.size))
        check_pair(manifest, config)
        if not matches(config, platform):
            raise error(
                "image_not_found",
                f"The image is for {shown(str(config.platform))}, not for {platform}.",
                detail={"platform": platform},
                fix="Ask for the platform that the image is for, or use another image.",
            )
        return config

    async def _fetch_layers(self, ref: Reference, scope: str, lent: Lent, manifest: Manifest, say: Say) -> None:
        turn = asyncio.Semaphore(LAYERS_AT_ONCE)
        count = len(manifest.layers)

        async def one(number: int, layer: Descriptor) -> None:
            async with turn:
                progress = _Progress(say, layer, number, count)
                await self._fetch(ref, layer, scope, lent, progress)
                progress(layer.size)

        seen: dict[str, tuple[int, Descriptor]] = {}
        for number, layer in enumerate(manifest.layers, 1):
            seen.setdefault(layer.digest, (number, layer))
        await together([one(number, layer) for number, layer in seen.values()])

    async def _fetch(
        self, ref: Reference, what: Descriptor, scope: str, lent: Lent, progress: Callable[[int], None]
    ) -> None:
        def read(offset: int, is_again: bool) -> AsyncGenerator[bytes, None]:
            return lent.source.blob(ref, what, offset, use_mirrors=not is_again)

        async def work(say: Callable[[int], None]) -> None:
            if not self._store.has_blob(what.digest, scope):
                async with lent.borrowed():
                    await blobs.fetch(self._store, what.digest, what.size, scope, read, say)

        if self._store.has_blob(what.digest, scope):
            return
        key = (what.digest, scope)
        joined = key in self._downloads.keys()  # noqa: SIM118 - not a mapping
        try:
            await self._downloads.join(key, work, progress)
        except ClocheError as failed:
            if not joined or failed.code not in SOMEBODY_ELSES:
                raise
            await self._downloads.join(key, work, progress)

    async def _tidy(self, put: set[str]) -> None:
        """What no image refers to goes; its partial stays for the next attempt."""
        async with self._store.changing:
            for name in {hex_of(digest) for digest in put} & set(self._store.unreferenced_blobs()):
                await self._store.remove_blob(name)


class _Progress:
    """Says how far a layer is, not too often."""

    def __init__(self, say: Say, layer: Descriptor, number: int, of: int) -> None:
        self._say = say
        self._layer = layer
        self._number = number
        self._of = of
        self._said_at = 0.0

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self._said_at < SAY_EVERY_S and done < self._layer.size:
            return
        self._said_at = now
        self._say(
            ImageEvent(
                kind="layer",
                digest=self._layer.digest,
                bytes_done=done,
                bytes_total=self._layer.size,
                number=self._number,
                of=self._of,
            )
        )


async def resolve(ref: Reference, platform: str, source: Source) -> Resolved:
    """The manifest for that platform, directly or through an index."""
    top, data = await source.resolve(ref)
    if digest_of(data) != top.digest or (ref.digest is not None and ref.digest != top.digest):
        raise error("image_corrupt", "The manifest's content has another hash than its digest.")
    found = parse_manifest(data, top.media_type)
    if isinstance(found, Manifest):
        return Resolved(top, data, found, None)
    entry = choose(found, platform)
    media_type, inner = await source.manifest(ref, entry.digest)
    if digest_of(inner) != entry.digest or len(inner) != entry.size:
        raise error("image_corrupt", "The manifest for this platform has another hash or length than the index says.")
    manifest = parse_manifest(inner, media_type)
    if isinstance(manifest, Index):
        raise error("image_refused", "The index names another index.", detail={"reason": "nested_index"})
    return Resolved(Descriptor(manifest.media_type, entry.digest, entry.size), inner, manifest, data)


async def together(work: Sequence[Awaitable[None]]) -> None:
    """All of it, or the first failure; the others have ended then."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _nothing(_: int) -> None:
    pass
