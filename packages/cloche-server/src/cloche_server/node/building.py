"""One build on this node: the context on the store's disk, rooms from the workshop, layers and image in the store."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Final

from cloche.wire.defaults import GIB, MIB
from cloche.wire.errors import ClocheError, error
from cloche.wire.images import BuildOptions, ImageEvent, ImageView
from cloche_server.api.backend import Caller
from cloche_server.images import archives
from cloche_server.images.build import compat
from cloche_server.images.build.builder import Builder
from cloche_server.images.build.compat import CompatBuilder
from cloche_server.images.build.making import BuildLimits
from cloche_server.images.manifest import host_platform
from cloche_server.images.reference import parse, shown
from cloche_server.images.service import Images
from cloche_server.node.telling import Say
from cloche_server.node.workshop import Builds, Workshop

CONTEXT_BYTES_MAX: Final = 16 * GIB
DISK_BYTES_MIN: Final = 2 * GIB
DISK_PART: Final = 4
"""Without a wish, a room gets at most this part of what is free: a build has several rooms."""

BUILDAH_VARIABLE: Final = "CLOCHE_BUILDAH_IMAGE"
LOCAL: Final = "localhost"
"""The registry of names that are no registry's: images of such a name are made here, never pulled."""
ARCHIVE_SLACK_BYTES: Final = 64 * MIB
"""A tar of what is on a disk has headers beside its bytes."""


async def build(
    images: Images, builds: Builds, caller: Caller, context: AsyncIterator[bytes], options: BuildOptions, say: Say
) -> ImageView:
    """All of `context` is read before anything is said."""
    limits = limits_of(options, builds.disk_free_bytes())
    workshop = Workshop(builds.maker, caller, images.empty_root, options.egress)
    platform = str(host_platform())
    async with images.shelf(caller.owner, on_event=say) as shelf:
        file = shelf.temporary()
        try:
            await archives.receive(file, context, CONTEXT_BYTES_MAX)
            builder: Builder | CompatBuilder
            if options.compat:
                tools = buildah_image(images, caller.owner)
                moving = OwnersArchives(images, caller.owner, say, limits.disk_bytes + ARCHIVE_SLACK_BYTES)
                builder = CompatBuilder(
                    workshop,
                    shelf,
                    builds.converter,
                    moving,
                    on_event=say,
                    platform=platform,
                    limits=limits,
                    image=tools,
                )
            else:
                builder = Builder(
                    workshop, shelf, builds.converter, shelf, on_event=say, platform=platform, limits=limits
                )
            return await builder.build(file, options)
        finally:
            os.close(file)


def limits_of(options: BuildOptions, disk_free_bytes: int) -> BuildLimits:
    usual = BuildLimits()
    if options.compat:
        usual = replace(usual, memory_bytes=compat.MEMORY_BYTES)
    disk = min(usual.disk_bytes, max(DISK_BYTES_MIN, disk_free_bytes // DISK_PART))
    return BuildLimits(
        memory_bytes=options.memory_bytes or usual.memory_bytes,
        disk_bytes=options.disk_bytes or disk,
        copied_bytes=options.disk_bytes or disk,
    )


@dataclass(frozen=True)
class OwnersArchives:
    """`compat.Archives` on the store, for one owner."""

    images: Images
    owner: str
    say: Say
    bytes_max: int

    def export(self, name: str) -> AsyncIterator[bytes]:
        return self.images.export(name, self.owner)

    async def import_layout(self, data: AsyncIterator[bytes], name: str | None) -> ImageView:
        """A guest wrote it: one image, and no name but the caller's."""
        (view,) = await self.images.import_archive(
            data, name, owner=self.owner, on_event=self._pass_on, bytes_max=self.bytes_max, is_one=True
        )
        return view

    def _pass_on(self, event: ImageEvent) -> None:
        """The build says itself when it is done."""
        if event.kind != "done":
            self.say(event)


def buildah_image(images: Images, owner: str) -> str:
    """What --compat runs in. Only one of a registry is pulled."""
    name = os.environ.get(BUILDAH_VARIABLE, "").strip() or compat.IMAGE
    if parse(name).registry == LOCAL:
        try:
            images.find(name, owner)
        except ClocheError as missing:
            raise error(
                "image_not_found",
                f"A build with --compat runs in the image {shown(name)}, and you have none of that name.",
                fix=f"Make it: python -m tools.images.make buildah DIR && cloche image import -t {shown(name)} DIR",
                detail={"image": shown(name)},
            ) from missing
    return name
