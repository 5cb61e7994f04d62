"""The image half of the memory backend: names and bytes, nothing is pulled or run.

A name that begins with `missing` is not found; `denied` is refused by the registry; `broken` fails after its first event; `crash`
breaks the backend itself.
"""

from __future__ import annotations

import asyncio
import builtins
import hashlib
from collections.abc import AsyncIterator

from cloche.wire.errors import error
from cloche.wire.images import BuildOptions, FsckReport, GcImages, GcResult, ImageEvent, ImageView, PullImage
from cloche_server.api.backend import Caller

LAYERS = 2
LAYER_BYTES = 1000


def view_of(name: str, **more: object) -> ImageView:
    digest = "sha256:" + hashlib.sha256(name.encode()).hexdigest()
    fields = {"names": [name], "platform": "linux/amd64", "source": "registry", "layers": LAYERS, "size_bytes": 2000}
    return ImageView.model_validate(
        {"digest": digest, "root_bytes": 4096, "added_at": 1.0, "used_at": 2.0, **fields, **more}
    )


class MemoryImages:
    """`images` is the store; `pulls`, `builds` and `working` show a test what was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.images: dict[str, ImageView] = {}
        self.archives: dict[str, bytes] = {}
        self.pulls: list[PullImage] = []
        self.builds: list[tuple[BuildOptions, bytes]] = []
        self.collected: list[GcImages] = []
        self.working = 0
        self.pull_until: asyncio.Event | None = None

    def _find(self, image: str) -> ImageView:
        for view in self.images.values():
            if image in (view.digest, *view.names):
                return view
        raise error("image_not_found", f"There is no image {image!r} here.", detail={"image": image})

    async def list_images(self, caller: Caller) -> builtins.list[ImageView]:
        return list(self.images.values())

    async def inspect_image(self, caller: Caller, image: str) -> ImageView:
        return self._find(image)

    async def pull_image(self, caller: Caller, request: PullImage) -> AsyncIterator[ImageEvent]:
        self.pulls.append(request)
        name = request.image
        if name.startswith("missing"):
            raise error("image_not_found", f"The registry has no {name!r}.")
        if name.startswith("denied"):
            raise error("registry_denied", f"The registry does not show {name!r}.")
        if name.startswith("crash"):
            raise RuntimeError("secret words of the backend")
        self.working += 1
        try:
            view = view_of(name, private=request.credentials is not None)
            yield ImageEvent(kind="resolved", image=name, digest=view.digest)
            if name.startswith("broken"):
                raise error("image_corrupt", "A layer is not what its digest says.")
            if self.pull_until is not None:
                await self.pull_until.wait()
            for number in range(LAYERS):
                for done in (0, LAYER_BYTES):
                    yield ImageEvent(
                        kind="layer",
                        digest=f"sha256:{number}",
                        number=number + 1,
                        of=LAYERS,
                        bytes_done=done,
                        bytes_total=LAYER_BYTES,
                    )
            yield ImageEvent(kind="convert", bytes_done=4096, bytes_total=4096)
            self.images[name] = view
            yield ImageEvent(kind="done", image=name, digest=view.digest, view=view)
        finally:
            self.working -= 1

    async def import_image(
        self, caller: Caller, data: AsyncIterator[bytes], name: str | None
    ) -> AsyncIterator[ImageEvent]:
        body = b"".join([part async for part in data])
        if not body:
            raise error("image_refused", "The archive is empty.", detail={"reason": "bad_archive"})
        view = view_of(name or "imported:latest", source="archive")
        self.images[view.names[0]] = view
        self.archives[view.names[0]] = body
        yield ImageEvent(kind="done", image=view.names[0], digest=view.digest, view=view)

    async def export_image(self, caller: Caller, image: str) -> AsyncIterator[bytes]:
        name = self._find(image).names[0]
        body = self.archives.get(name, b"tar of " + name.encode())
        for low in range(0, len(body), 4096):
            yield body[low : low + 4096]

    async def build_image(
        self, caller: Caller, context: AsyncIterator[bytes], options: BuildOptions
    ) -> AsyncIterator[ImageEvent]:
        self.builds.append((options, b"".join([part async for part in context])))
        yield ImageEvent(kind="step", step="FROM scratch", number=1, of=2, cached=False)
        yield ImageEvent(kind="step", step="RUN make", number=2, of=2, cached=False)
        yield ImageEvent(kind="output", text="\x1b[31mhello\n")
        if options.target == "broken":
            raise error("build_failed", "Line 2, RUN make: exit code 3.")
        view = view_of(options.name or "built:latest", source="build")
        self.images[view.names[0]] = view
        yield ImageEvent(kind="done", image=view.names[0], digest=view.digest, view=view)

    async def remove_image(self, caller: Caller, image: str) -> ImageView:
        return self.images.pop(self._find(image).names[0])

    async def gc_images(self, caller: Caller, request: GcImages) -> GcResult:
        self.collected.append(request)
        gone, self.images = list(self.images), {}
        return GcResult(images=gone, blobs=len(gone), roots=len(gone), bytes=len(gone) * 4096)

    async def fsck_images(self, caller: Caller, *, repair: bool) -> FsckReport:
        return FsckReport(blobs=len(self.images), roots=len(self.images), images=len(self.images), bytes=0)
