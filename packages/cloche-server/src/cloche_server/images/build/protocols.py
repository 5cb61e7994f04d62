"""What a build needs from others: a room to run steps in, the shelf of images, a memory of finished steps.

The node implements `Workshop` and `Room` on its sandboxes and `Shelf` and `BuildCache` on the image store. A build itself opens
no socket, no path of the host and no process but the parser's. Everything that a room answers was chosen by a guest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from cloche.wire.images import ImageView


@dataclass(frozen=True)
class LayerRef:
    """A layer whose blob is in the store."""

    digest: str
    diff_id: str
    size: int
    media_type: str = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass(frozen=True)
class Base:
    """An image to build on, or to copy from: present, converted, held until the build ends."""

    digest: str
    layers: tuple[LayerRef, ...]
    config: dict[str, Any]
    """The whole OCI config document, as parsed: `config`, `history`, `architecture`..."""
    root_file: str
    """What `Workshop.open` takes: `service.Root.file`."""


@dataclass(frozen=True)
class Cached:
    """What a finished step left: all layers of the image so far, the base's included, and when it ran (RFC 3339)."""

    layers: tuple[LayerRef, ...]
    created: str


@dataclass(frozen=True)
class Found:
    """What is at a path in a room. Links are followed."""

    kind: Literal["dir", "file", "other"]
    path: str
    """As asked."""


class Room(Protocol):
    """One sandbox for the steps of one stage: privileges package-install, the build's own way out, a time and size of its own."""

    @property
    def drop(self) -> Sequence[str]:
        """Paths of the upper layer that are the node's, not the build's (`Converter.upper(drop=...)`)."""
        ...

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: dict[str, str],
        user: str,
        workdir: str,
        stdin: bytes | None,
        on_output: Callable[[int, bytes], None],
        timeout_s: float,
    ) -> int:
        """The exit code (128 + n for signal n). TimeoutError: it ran too long and was ended.

        `user` is as in Dockerfiles: name, uid, name:group, uid:gid. A program, user or directory that does not exist is
        the ClocheError of the table. `env` is all that the command gets, beside what every command gets.
        """
        ...

    async def stat(self, path: str) -> Found | None:
        """As root with package-install. None: nothing there, or a link to nothing."""
        ...

    async def read_file(self, path: str, bytes_max: int) -> bytes | None:
        """For /etc/passwd and /etc/group. None: not there. Longer than allowed: cut."""
        ...

    async def put_tree(self, path: str, tar: AsyncIterator[bytes]) -> None:
        """Unpacks below `path`, which exists and may be reached through links.

        Owners and modes are the archive's (numbers), whoever owns the directory: as root with package-install. A
        directory that exists stays, with the archive's owner and mode; a directory never replaces anything else (that
        fails the call); anything else gives way to what the archive has. Names come parents first. Any entry that fails
        fails the call. It must work in an image without `tar` and without a shell.
        """
        ...

    def get_tree(self, path: str) -> AsyncIterator[bytes]:
        """A tar: of a directory its content (names relative to it), of a file one entry with its name.

        `path` itself may be a link and is followed; links below are entries. As root with package-install: what cannot
        be read fails the call. Of `/`: without `drop`, and without what is in /proc, /sys and /dev. No entry of ours
        (`.cloche-result.json`) at its end.
        """
        ...

    async def export(self, sink_fd: int) -> None:
        """The raw upper layer (`export_upper`) into a file: all that changed since the room's root."""
        ...

    async def close(self) -> None:
        """Everything of it is gone. Idempotent."""
        ...


class Workshop(Protocol):
    """Opens rooms."""

    async def open(self, root_file: str | None, *, disk_bytes: int, memory_bytes: int) -> Room:
        """None: an empty root with nothing but the agent (`FROM scratch`)."""
        ...


class Shelf(Protocol):
    """The image store, for one build: what it hands out is held until the build ends."""

    async def base(self, name: str) -> Base:
        """Present or pulled, and converted. The caller's rights and credentials are the build's owner's."""
        ...

    async def root(self, layers: Sequence[LayerRef]) -> str:
        """A root file of exactly these layers, for a room: converted when it is not there yet. No image, no name."""
        ...

    async def put_layer(self, fd: int, *, digest: str, diff_id: str, size: int) -> LayerRef:
        """The bytes of `fd` (a file of `temporary()`) become a blob of the store."""
        ...

    async def commit(self, layers: Sequence[LayerRef], config: dict[str, Any], name: str | None) -> ImageView:
        """An image of the store: manifest, config, root, name. Layers are the whole list, base's included."""
        ...

    def temporary(self) -> int:
        """A new unlinked file on the store's disk, read and write. The caller closes it."""
        ...


class BuildCache(Protocol):
    """`cache/<key>.json` in the store. A record whose blobs are not all there any more is None; the blobs of one that was
    given out are held until the build ends. A key is 64 hex digits.
    """

    async def get(self, key: str) -> Cached | None: ...

    async def put(self, key: str, made: Cached) -> None: ...


class Indexed(Protocol):
    """`images.worker.Entry`, as far as a build looks at it."""

    @property
    def path(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def mode(self) -> int: ...
    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def mtime(self) -> float: ...
    @property
    def size(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def link(self) -> str | None: ...
    @property
    def sha256(self) -> str | None: ...


class Made(Protocol):
    """`images.worker.LayerMade`, as far as a build looks at it."""

    @property
    def digest(self) -> str: ...
    @property
    def diff_id(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def entries(self) -> int: ...


class Converter(Protocol):
    """`images.worker.Converter`, as far as a build asks it."""

    async def index(self, source: int, output: int) -> Sequence[Indexed]: ...

    async def upper(self, source: int, output: int, *, compression: str = "gzip", drop: Sequence[str] = ()) -> Made: ...
