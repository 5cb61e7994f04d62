"""Images: what the node asks of this room. A name becomes a root that sandboxes share, once for everybody who asks.

A name means, in this order: a prebuilt root of that bare name; a digest; what this owner has by that name; what anybody
has who needed no credentials of his own. What was brought with somebody's credentials, archive or build is his alone.
"""

from __future__ import annotations

import hashlib
import time
from asyncio import to_thread
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from cloche.wire import images as wire
from cloche.wire.errors import ClocheError, error
from cloche.wire.images import FsckReport, GcResult, ImageEvent, ImageView
from cloche_server.images import archives, auth, gc, views
from cloche_server.images.archives import UPLOAD_BYTES_MAX, Archives, Indexer, Naming
from cloche_server.images.bringing import Bringer
from cloche_server.images.build.protocols import LayerRef
from cloche_server.images.building import Shelf
from cloche_server.images.flights import Flights
from cloche_server.images.fsck import Fsck
from cloche_server.images.layout import DIGEST, PUBLIC, ImageRecord, NameRecord, name_key
from cloche_server.images.lookup import SHORT_DIGEST, Lookup
from cloche_server.images.prebuilt import Prebuilt, Root
from cloche_server.images.pulling import Pulls, Source
from cloche_server.images.reference import parse, shown
from cloche_server.images.registry import Registry
from cloche_server.images.roots import ImageConverter, Roots
from cloche_server.images.settings import RegistrySettings
from cloche_server.images.store import Store, blobs_of, may_see
from cloche_server.images.trust import TrustPolicy
from cloche_server.images.trusting import UNSIGNED, Trusting

__all__ = ["Images", "Root"]

PullPolicy = Literal["missing", "always", "never"]
Listener = Callable[[ImageEvent], None]
Sources = Callable[[auth.Credentials], Source]


class ImageWorker(ImageConverter, Indexer, Protocol):
    """`worker.Converter`, as far as images ask it."""


class Images:
    """See the module. `open` it once; it is the only one that uses its directory."""

    def __init__(
        self,
        store: Store,
        roots: Roots,
        converter: ImageWorker,
        trusting: Trusting,
        settings: RegistrySettings,
        sources: Sources | None,
        prebuilt: Path | None = None,
    ) -> None:
        self._store = store
        self._roots = roots
        self._trusting = trusting
        self._settings = settings
        self._sources: Sources = sources or (lambda credentials: Registry(settings, credentials))
        self._prebuilt = Prebuilt(prebuilt or store.layout.root)
        self._bringer = Bringer(store, roots, trusting)
        self._archives = Archives(store, self._bringer, converter)
        self._pulls = Pulls(store, roots, trusting.check_source)
        self._flights: Flights[ImageEvent, ImageRecord] = Flights()
        self._lookup = Lookup(store, settings.default_registry)

    @classmethod
    async def open(
        cls,
        directory: Path,
        *,
        settings: RegistrySettings,
        converter: ImageWorker,
        converter_version: str,
        agent: Path,
        in_use: Callable[[], Iterable[str]] = tuple,
        trust: TrustPolicy | None = None,
        clock: Callable[[], float] = time.time,
        sources: Sources | None = None,
        prebuilt: Path | None = None,
    ) -> Images:
        """Takes the store's lock and finishes what a crash left. Raises store_busy.

        In a directory that this process may not write, only prebuilt roots are to be had, and no lock is taken.

        `in_use` gives the `Root.file` of every sandbox, once for each; it is asked here already. `converter_version` changes
        when the converter or mkfs makes other bytes of the same layers. `prebuilt` is where roots made elsewhere are, when not
        in `directory`.
        """
        store = await to_thread(Store.open, directory, clock=clock, in_use=in_use)
        try:
            roots = await to_thread(Roots, store, converter, converter_version, agent)
        except BaseException:
            store.close()
            raise
        return cls(store, roots, converter, Trusting(trust or TrustPolicy()), settings, sources, prebuilt)

    async def close(self) -> None:
        """Ends what is going on, so that who waits hears of it, and gives the lock back."""
        await self._flights.close()
        await self._pulls.close()
        await self._roots.close()
        self._store.close()

    # --- for sandboxes ------------------------------------------------------------------------------

    async def ensure(
        self,
        name: str,
        *,
        owner: str,
        credentials: wire.Credentials | None = None,
        pull: PullPolicy = "missing",
        platform: str | None = None,
        on_event: Listener | None = None,
    ) -> Root:
        """A root that is there, verified and allowed. It is not collected for a minute: start the sandbox by then."""
        if pull != "always":
            ready = self._prebuilt.find(name)
            if ready is not None:
                return ready
            image = self._lookup.local(name, owner, platform)
            if image is not None:
                try:
                    return await self._use(image, name, owner, on_event)
                except ClocheError as failed:
                    if failed.code not in UNSIGNED or pull == "never" or DIGEST.fullmatch(name):
                        raise  # the registry may have a signature that was not there or not asked for before
        if pull == "never" or DIGEST.fullmatch(name):
            raise self._not_found(name)
        image = await self._fetch(name, owner, credentials, platform, on_event)
        return await self._use(image, name, owner, on_event)

    def holding(self, root: Root) -> AbstractContextManager[None]:
        """While a sandbox is made of it: neither `remove` nor a collection takes it away. Ask for it at once after `ensure`."""
        self._store.taken(root.file)
        return self._store.holding([root.file])

    async def pull(
        self,
        name: str,
        *,
        owner: str,
        credentials: wire.Credentials | None = None,
        platform: str | None = None,
        on_event: Listener | None = None,
    ) -> ImageView:
        """Asks the registry what the name means now, and fetches what is missing."""
        image = await self._fetch(name, owner, credentials, platform, on_event)
        view = self._view(image, owner, False)
        if on_event is not None:
            on_event(ImageEvent(kind="done", image=name, digest=image.digest, view=view))
        return view

    # --- brought, not pulled ------------------------------------------------------------------------

    async def import_archive(
        self,
        data: AsyncIterator[bytes],
        name: str | None = None,
        *,
        owner: str,
        on_event: Listener | None = None,
        bytes_max: int = UPLOAD_BYTES_MAX,
        is_one: bool = False,
    ) -> Sequence[ImageView]:
        """The images of an OCI layout or a `docker save` in a plain tar. They are this owner's alone.

        `is_one`: it must have one image, and what the archive calls it is ignored.
        """
        self._store.require_writable()
        naming = Naming(self._lookup.parse(name) if name is not None else None, is_one)
        say = on_event or _ignore
        found = await self._archives.take(data, owner=owner, naming=naming, say=say, bytes_max=bytes_max)
        shown_to_owner = [self._view(image, owner, False) for image in found]
        if on_event is not None:
            for view in shown_to_owner:
                on_event(ImageEvent(kind="done", digest=view.digest, view=view))
        return shown_to_owner

    def export(self, name: str, owner: str, is_admin: bool = False) -> AsyncIterator[bytes]:
        """An OCI layout as a tar. Raises image_not_found before the first byte."""
        if self._prebuilt.find(name) is not None:
            raise error("unsupported", f"{name!r} is a prebuilt root: it has no layers to export.")
        image = self.find(name, owner, is_admin)
        named = None if SHORT_DIGEST.fullmatch(name) else self._lookup.parse(name)
        return archives.export(self._store, image, named.name if named is not None and named.tag else None)

    def shelf(
        self, owner: str, *, credentials: wire.Credentials | None = None, on_event: Listener | None = None
    ) -> Shelf:
        """For one build: `async with images.shelf(owner) as shelf`. It is its `Shelf` and its `BuildCache`."""
        self._store.require_writable()

        async def base(name: str) -> ImageRecord:
            root = await self.ensure(name, owner=owner, credentials=credentials, on_event=on_event)
            if root.digest is None or root.digest not in self._store.images:
                raise error("image_not_found", f"{shown(name)} is a prebuilt root: it has no layers to build on.")
            return self._store.images[root.digest]

        return Shelf(
            self._store,
            self._roots,
            self._bringer,
            owner,
            ensure=base,
            parse=self._lookup.parse,
            view=lambda image: self._view(image, owner, False),
            say=on_event or _ignore,
        )

    async def commit(
        self,
        layers: Sequence[LayerRef],
        config: dict[str, Any],
        name: str | None,
        *,
        owner: str,
        on_event: Listener | None = None,
    ) -> ImageView:
        """An image of layers whose blobs are in the store (an image's, or put on a shelf that is still open), base first."""
        async with self.shelf(owner, on_event=on_event) as shelf:
            return await shelf.commit(layers, config, name)

    async def empty_root(self) -> str:
        """The file of a root with nothing but the agent, for builds from scratch."""
        self._store.require_writable()
        key = await self._roots.ensure([], _ignore)
        self._store.give_out(key)
        return self._roots.file_of([])

    # --- for people ---------------------------------------------------------------------------------

    def list(self, owner: str, is_admin: bool = False) -> list[ImageView]:
        """What this owner may use; the last used first, then the prebuilt ones."""
        uses = self._store.uses()
        found = [
            views.image_view(self._store, image, owner, is_admin, uses)
            for image in self._store.images.values()
            if is_admin or may_see(image, owner)
        ]
        found.sort(key=lambda view: (-view.used_at, view.digest))
        ready = [root for name in self._prebuilt.names() if (root := self._prebuilt.find(name)) is not None]
        return found + [views.prebuilt_view(self._prebuilt, root, uses) for root in ready]

    def inspect(self, name: str, owner: str, is_admin: bool = False) -> ImageView:
        ready = self._prebuilt.find(name)
        if ready is not None:
            return views.prebuilt_view(self._prebuilt, ready, self._store.uses())
        return self._view(self.find(name, owner, is_admin), owner, is_admin)

    async def remove(self, name: str, owner: str, is_admin: bool = False) -> ImageView:
        """Forgets the name; the image goes with its last one. By digest: all of this owner's names, and the image."""
        if self._prebuilt.find(name) is not None:
            raise error("forbidden", f"{name!r} is a prebuilt root, not of the store.", fix="Remove its file by hand.")
        async with self._store.changing:
            image = self.find(name, owner, is_admin)
            view = self._view(image, owner, is_admin)
            mine = self._removable(name, image, owner, is_admin)
            left = [each for each in self._store.names.values() if each.digest == image.digest and each not in mine]
            owners = [each for each in image.owners if each != owner]
            if left or (not is_admin and (owners or image.public)):
                await self._store.drop_names([name_key(each.scope, each.platform, each.name) for each in mine])
                if not is_admin and owner in image.owners and not any(each.scope == owner for each in left):
                    await self._store.save_image(msgspec.structs.replace(image, owners=owners))
                return view
            if self._store.is_image_busy(image, self._store.uses()):
                raise error("image_in_use", f"A sandbox runs from {shown(name)}.", detail={"in_use": view.in_use})
            await self._store.remove_image(image.digest)
            return view

    async def gc(self, max_bytes: int | None = None, max_age_s: float | None = None) -> GcResult:
        self._store.require_writable()
        return await gc.collect(self._store, max_bytes=max_bytes, max_age_s=max_age_s)

    async def fsck(self, repair: bool = False) -> FsckReport:
        self._store.require_writable()
        return await Fsck(self._store).run(repair)

    def size_bytes(self) -> int:
        return self._store.bytes()

    def find(self, name: str, owner: str, is_admin: bool = False) -> ImageRecord:
        """By name, digest or the first 12 digits of one. Raises image_not_found, ambiguous."""
        image = self._lookup.any(name, owner, is_admin)
        if image is None:
            raise self._not_found(name)
        return image

    # --- how ----------------------------------------------------------------------------------------

    async def _use(self, image: ImageRecord, name: str, owner: str, on_event: Listener | None) -> Root:
        with self._store.holding([*blobs_of(image), self._roots.file_of(image.layers)]):
            await self._check_trust(image, name, owner)
            key = await self._roots.ensure(image.layers, on_event or _ignore)
            if key != image.root:
                async with self._store.changing:
                    image = msgspec.structs.replace(self._store.images[image.digest], root=key)
                    await self._store.save_image(image)
            self._store.mark_used(image.digest)
            self._store.give_out(key)
        return views.root_of(self._store, image, name)

    async def _check_trust(self, image: ImageRecord, name: str, owner: str) -> None:
        if DIGEST.fullmatch(name):
            refs = [parse(each.name) for each in self._store.names_of(image.digest, owner)]
        else:
            refs = [self._lookup.parse(name)]
        signed = await self._trusting.check_kept(refs, image, self._store)
        if not set(signed) <= set(image.signed_by):
            async with self._store.changing:
                now = self._store.images[image.digest]
                names = sorted({*now.signed_by, *signed})
                await self._store.save_image(msgspec.structs.replace(now, signed_by=names))

    async def _fetch(
        self,
        name: str,
        owner: str,
        credentials: wire.Credentials | None,
        platform: str | None,
        on_event: Listener | None,
    ) -> ImageRecord:
        self._store.require_writable()
        ref = self._lookup.parse(name)
        wanted = self._lookup.platform(platform)
        scope = PUBLIC if credentials is None else owner
        login = None if credentials is None else auth.Login(credentials.username, credentials.password)

        async def work(say: Listener) -> ImageRecord:
            return await self._pulls.pull(ref, wanted, scope, self._sources(auth.Credentials(login)), say)

        key = (ref.name, wanted, scope, _fingerprint(login))
        return await self._flights.join(key, work, on_event)

    def _removable(self, name: str, image: ImageRecord, owner: str, is_admin: bool) -> Sequence[NameRecord]:
        """The names that this call takes away."""
        all_names = [each for each in self._store.names.values() if each.digest == image.digest]
        by_digest = SHORT_DIGEST.fullmatch(name) is not None or self._lookup.parse(name).digest is not None
        asked = all_names if by_digest else [each for each in all_names if each.name == self._lookup.parse(name).name]
        own = [each for each in asked if each.scope == owner]
        if not is_admin and not own and (asked or image.public):
            raise error("forbidden", f"{shown(name)} is everybody's; only the node's administrator removes it.")
        return asked if is_admin else own

    def _view(self, image: ImageRecord, owner: str, is_admin: bool) -> ImageView:
        return views.image_view(self._store, image, owner, is_admin, self._store.uses())

    def _not_found(self, name: str) -> ClocheError:
        here = self._prebuilt.names()
        return error(
            "image_not_found", f"There is no image {shown(name)!r} here.", detail={"image": shown(name), "here": here}
        )


def _fingerprint(login: auth.Login | None) -> Hashable:
    """Work is shared only between callers who would ask the registry as the same person."""
    if login is None:
        return None
    return hashlib.sha256(f"{len(login.username)}:{login.username}{login.password}".encode()).digest()


def _ignore(_: ImageEvent) -> None:
    pass
