"""The store's form on disk: its places, its records, and how a file gets there whole or not at all.

    lock                      held by the one node that uses this store
    format                    the form of this directory
    blobs/sha256/HEX          verified manifests, configs, layers, signatures; 0444
    roots/KEY.erofs, .json    a root file system and what is known of it; 0444
    images/HEX.json           one image, by its manifest's digest; its time of change is when it was last used
    names/HEX.json            a name and the image it points at; HEX is of owner, platform and name
    cache/HEX.json            a build's step and the layers that it left; HEX is of owner and key
    tmp/                      unfinished, emptied at start; tmp/partial/HEX[.SCOPE] are downloads that can go on
    NAME.erofs, NAME.json     roots made elsewhere: never touched

Written in the order blobs, root, image, name. The image's record decides: with it the image is there, without it the next start
removes what is left.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from cloche.wire.errors import error

FORMAT: Final = 1
HEX: Final = re.compile(r"[0-9a-f]{64}")
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
PARTIAL: Final = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{16})?")
RECORD_BYTES_MAX: Final = 4 * 1024 * 1024
PUBLIC: Final = ""
"""The scope of what was fetched without anybody's own credentials."""
POINTS: Final = (
    "images.pull.resolved",
    "images.blob.after_partial",
    "images.blob.before_link",
    "images.blob.after_link",
    "images.root.before_link",
    "images.root.after_link",
    "images.root.after_record",
    "images.image.before_record",
    "images.image.after_record",
    "images.name.after_record",
    "images.import.received",
    "images.import.indexed",
    "images.remove.after_image",
    "images.remove.after_name",
    "images.remove.after_root",
    "images.remove.after_blobs",
    "images.gc.after_partials",
    "images.gc.after_unreferenced",
)
"""Where a test may kill the process; each must leave a store that is whole when it is opened again."""


class LayerRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer. That `digest` unpacks to `diff_id` was seen by the converter before this was written."""

    digest: str
    size: int
    media_type: str
    compression: Literal["none", "gzip", "zstd"]
    diff_id: str


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """images/HEX.json."""

    digest: str
    media_type: str
    size: int
    """Of the manifest."""
    platform: str
    source: Literal["registry", "archive", "build"]
    config: str
    config_size: int
    layers: list[LayerRecord]
    root: str | None = None
    """The key of the root that was made last; None: it is made when it is needed."""
    indexes: list[str] = []
    """Digests of the indexes that named this manifest."""
    public: bool = False
    owners: list[str] = []
    """Who brought it with his own credentials, archive or build."""
    signatures: list[str] = []
    """Blobs with the signatures that were found, to verify again without the network."""
    signed_by: list[str] = []
    created: str | None = None
    added_at: float

    @property
    def root_file(self) -> str | None:
        return None if self.root is None else root_name(self.root)


class CacheLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layer of a build's step."""

    digest: str
    diff_id: str
    size: int
    media_type: str


class CacheRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """cache/HEX.json: what a step of somebody's build left."""

    scope: str
    key: str
    layers: list[CacheLayer]
    created: str


class NameRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """names/HEX.json."""

    name: str
    scope: str
    platform: str
    digest: str
    at: float


class RootRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """roots/KEY.json."""

    key: str
    root_sha256: str
    root_bytes: int
    raw_bytes: int
    entries: int
    diff_ids: list[str]
    converter: str
    agent: str
    lost: dict[str, Any]
    made_at: float


RecordT = TypeVar("RecordT", bound=msgspec.Struct)
_ENCODER: Final = msgspec.json.Encoder(order="sorted")


class Layout:
    """Paths below one directory. Names are hashes that were checked, never a caller's word."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = root / "lock"
        self.format = root / "format"
        self.blobs = root / "blobs" / "sha256"
        self.roots = root / "roots"
        self.images = root / "images"
        self.names = root / "names"
        self.cache = root / "cache"
        self.tmp = root / "tmp"
        self.partial = root / "tmp" / "partial"

    def make(self) -> None:
        """What an owner alone may see is closed to the machine's other users."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o755)
        closed = (self.root / "blobs", self.blobs, self.images, self.names, self.cache, self.tmp, self.partial)
        for path, mode in (*((path, 0o700) for path in closed), (self.roots, 0o711)):
            if not path.is_dir():
                path.mkdir(exist_ok=True)
                path.chmod(mode)  # whatever the umask says

    def blob(self, digest: str) -> Path:
        return self.blobs / hex_of(digest)

    def image(self, digest: str) -> Path:
        return self.images / f"{hex_of(digest)}.json"

    def name_file(self, key: str) -> Path:
        return self.names / f"{checked_key(key)}.json"

    def cache_file(self, key: str) -> Path:
        return self.cache / f"{checked_key(key)}.json"

    def root_file(self, key: str) -> Path:
        return self.root / root_name(key)

    def root_record(self, key: str) -> Path:
        return self.roots / f"{checked_key(key)}.json"

    def partial_file(self, digest: str, scope: str) -> Path:
        name = hex_of(digest)
        if scope != PUBLIC:
            name += "." + hashlib.sha256(scope.encode()).hexdigest()[:16]
        return self.partial / name

    def scratch(self, mode: int = 0o600) -> int:
        """A file without a name, for reading and writing; gone with its descriptor unless it is published."""
        fd = os.open(self.tmp, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode)
        os.fchmod(fd, mode)  # whatever the umask says
        return fd


def hex_of(digest: str) -> str:
    """The file name of a digest; anything but sha256 is refused by name."""
    if not DIGEST.fullmatch(digest):
        raise error("image_refused", "Only sha256 digests are known here.", detail={"reason": "bad_digest"})
    return digest[7:]


def checked_key(key: str) -> str:
    assert HEX.fullmatch(key), "a key is our own hash"
    return key


def root_name(key: str) -> str:
    """As the keeper is told: below the images directory."""
    return f"roots/{checked_key(key)}.erofs"


def name_key(scope: str, platform: str, name: str) -> str:
    return hashlib.sha256("\0".join((scope, platform, name)).encode()).hexdigest()


def cache_key(scope: str, key: str) -> str:
    return hashlib.sha256("\0".join((scope, key)).encode()).hexdigest()


def root_key(diff_ids: Iterable[str], converter: str, agent: str) -> str:
    """Equal for what makes equal bytes: the unpacked layers, the program that merges them, the agent inside."""
    said = msgspec.json.encode(["cloche-root-1", list(diff_ids), converter, agent])
    return hashlib.sha256(said).hexdigest()


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


# --- files ----------------------------------------------------------------------------------------


def encode(record: msgspec.Struct) -> bytes:
    return _ENCODER.encode(record)


def read_record(path: Path, kind: type[RecordT]) -> RecordT:
    """Raises FileNotFoundError, msgspec.DecodeError (which ValidationError is)."""
    with path.open("rb") as file:
        data = file.read(RECORD_BYTES_MAX + 1)
    if len(data) > RECORD_BYTES_MAX:
        raise msgspec.DecodeError("the record is too long")
    return msgspec.json.decode(data, type=kind)


def write_record(path: Path, record: msgspec.Struct, tmp: Path, at: float, mode: int = 0o600) -> None:
    """Whole or not at all, and on the disk when this returns. `at` becomes its time of change."""
    unfinished = tmp / f"record-{path.name}"
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, encode(record))
        os.fchmod(fd, mode)
        os.utime(fd, (at, at))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(unfinished, path)
    sync_directory(path.parent)


def publish(fd: int, path: Path) -> bool:
    """Gives a scratch file its name, read-only and on the disk. False: there was one by that name already."""
    os.fchmod(fd, 0o444)
    os.fsync(fd)
    try:
        # With a directory's descriptor, even an unused one, Python follows the link as it is told.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except FileExistsError:
        return False
    sync_directory(path.parent)
    return True


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def sha256_file(path: Path | int, pieces: int = 1024 * 1024) -> str:
    """Of a regular file, read to its end; blocks, so call it in a thread."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC) if isinstance(path, Path) else path
    try:
        found, at = hashlib.sha256(), 0
        while data := os.pread(fd, pieces, at):
            found.update(data)
            at += len(data)
        return found.hexdigest()
    finally:
        if isinstance(path, Path):
            os.close(fd)


def size_of(path: Path) -> int:
    """0 for what is not there, and for what is no regular file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
