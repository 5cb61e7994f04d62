"""Images, as a Backend answers for them: the room `images/` does the work, here is whose it is and how it is told."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import cast

from cloche.wire.images import BuildOptions, FsckReport, GcImages, GcResult, ImageEvent, ImageView, PullImage
from cloche_server.api.backend import Caller
from cloche_server.images.service import Images
from cloche_server.node.telling import Say, told
from cloche_server.node.workshop import Builds

Views = list[ImageView]


class Imaging:
    """The image half of `api.backend.Backend`."""

    _builds: Builds
    """What a build needs of the node."""

    @property
    def images(self) -> Images:
        """Opened when the node starts."""
        raise NotImplementedError

    async def list_images(self, caller: Caller) -> Views:
        return self.images.list(caller.owner, caller.is_admin)

    async def inspect_image(self, caller: Caller, image: str) -> ImageView:
        return self.images.inspect(image, caller.owner, caller.is_admin)

    async def pull_image(self, caller: Caller, request: PullImage) -> AsyncIterator[ImageEvent]:
        async def work(say: Say) -> Sequence[ImageView]:
            return [
                await self.images.pull(
                    request.image,
                    owner=caller.owner,
                    credentials=request.credentials,
                    platform=request.platform,
                    on_event=say,
                )
            ]

        async with aclosing(told(work)) as events:
            async for event in events:
                yield event

    async def import_image(
        self, caller: Caller, data: AsyncIterator[bytes], name: str | None
    ) -> AsyncIterator[ImageEvent]:
        async def work(say: Say) -> Sequence[ImageView]:
            return await self.images.import_archive(data, name, owner=caller.owner, on_event=say)

        async with aclosing(told(work)) as events:
            async for event in events:
                yield event

    async def export_image(self, caller: Caller, image: str) -> AsyncIterator[bytes]:
        parts = self.images.export(image, caller.owner, caller.is_admin)
        async with aclosing(cast("AsyncGenerator[bytes, None]", parts)):
            async for part in parts:
                yield part

    async def build_image(
        self, caller: Caller, context: AsyncIterator[bytes], options: BuildOptions
    ) -> AsyncIterator[ImageEvent]:
        from cloche_server.node.building import build  # all of Dockerfiles: no other start needs it

        async def work(say: Say) -> Sequence[ImageView]:
            return [await build(self.images, self._builds, caller, context, options, say)]

        async with aclosing(told(work)) as events:
            async for event in events:
                yield event

    async def remove_image(self, caller: Caller, image: str) -> ImageView:
        return await self.images.remove(image, caller.owner, caller.is_admin)

    async def gc_images(self, caller: Caller, request: GcImages) -> GcResult:
        return await self.images.gc(request.max_bytes, request.max_age_s)

    async def fsck_images(self, caller: Caller, *, repair: bool) -> FsckReport:
        return await self.images.fsck(repair)
