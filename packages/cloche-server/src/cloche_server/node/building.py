"""One build on this node: the context on the store's disk, rooms from the workshop, layers and image in the store."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from cloche.wire.defaults import GIB
from cloche.wire.errors import error
from cloche.wire.images import BuildOptions, ImageView
from cloche_server.api.backend import Caller
from cloche_server.images import archives
from cloche_server.images.build.builder import Builder
from cloche_server.images.build.making import BuildLimits
from cloche_server.images.manifest import host_platform
from cloche_server.images.service import Images
from cloche_server.images.worker import Converter
from cloche_server.node.making import Maker
from cloche_server.node.telling import Say
from cloche_server.node.workshop import Workshop

CONTEXT_BYTES_MAX: Final = 16 * GIB
DISK_BYTES_MIN: Final = 2 * GIB
DISK_PART: Final = 4
"""Without a wish, a room gets at most this part of what is free: a build has several rooms."""


@dataclass(frozen=True)
class Builds:
    """What a build needs of the node."""

    maker: Maker
    converter: Converter
    disk_free_bytes: Callable[[], int]


async def build(
    images: Images, builds: Builds, caller: Caller, context: AsyncIterator[bytes], options: BuildOptions, say: Say
) -> ImageView:
    """All of `context` is read before anything is said."""
    if options.compat:
        raise error("unsupported", "This node cannot build with buildah yet.", fix="Build without --compat.")
    async with images.shelf(caller.owner, on_event=say) as shelf:
        file = shelf.temporary()
        try:
            await archives.receive(file, context, CONTEXT_BYTES_MAX)
            builder = Builder(
                Workshop(builds.maker, caller, images.empty_root),
                shelf,
                builds.converter,
                shelf,
                on_event=say,
                platform=str(host_platform()),
                limits=limits_of(options, builds.disk_free_bytes()),
            )
            return await builder.build(file, options)
        finally:
            os.close(file)


def limits_of(options: BuildOptions, disk_free_bytes: int) -> BuildLimits:
    usual = BuildLimits()
    disk = min(usual.disk_bytes, max(DISK_BYTES_MIN, disk_free_bytes // DISK_PART))
    return BuildLimits(
        memory_bytes=options.memory_bytes or usual.memory_bytes,
        disk_bytes=options.disk_bytes or disk,
        copied_bytes=options.disk_bytes or disk,
    )
