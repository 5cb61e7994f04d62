"""What the store finds when it is opened: the lock, the form, what was unfinished, the records."""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from cloche.wire.errors import error
from cloche_server.images.layout import (
    FORMAT,
    HEX,
    PARTIAL,
    CacheRecord,
    ImageRecord,
    Layout,
    NameRecord,
    RootRecord,
    name_key,
    read_record,
)

PARTIAL_AGE_S_MAX: Final = 7 * 86400.0
"""How long a download that stopped may wait to go on."""


@dataclass
class Found:
    """The records. Not whole: one of an image cannot be read, so nothing may be removed for want of a reference."""

    images: dict[str, ImageRecord] = field(default_factory=dict)
    names: dict[str, NameRecord] = field(default_factory=dict)
    roots: dict[str, RootRecord] = field(default_factory=dict)
    cache: dict[str, CacheRecord] = field(default_factory=dict)
    is_whole: bool = True


def make(layout: Layout) -> bool:
    """The directories. False: this process may not write here."""
    try:
        layout.make()
    except OSError as failed:
        if failed.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return False
    return os.access(layout.root, os.W_OK) and os.access(layout.tmp, os.W_OK)


def take_lock(layout: Layout) -> int:
    """The descriptor that holds it. Raises store_busy."""
    fd = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as failed:
        os.close(fd)
        if failed.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        raise error(
            "store_busy",
            f"The image store {layout.root} is used by another node.",
            detail={"directory": str(layout.root)},
        ) from failed
    return fd


def check_format(layout: Layout) -> None:
    """Raises state_too_new."""
    if not layout.format.exists():
        unfinished = layout.tmp / "format"
        unfinished.write_text(f"{FORMAT}\n")
        os.replace(unfinished, layout.format)
    found = layout.format.read_text()[:20].strip()
    if not found.isdigit() or int(found) > FORMAT:
        raise error("state_too_new", f"{layout.root} has form {found!r}; this node knows {FORMAT}.")


def clear_tmp(layout: Layout, now: float) -> None:
    """All of it but downloads that can go on."""
    for path in layout.tmp.iterdir():
        if path != layout.partial:
            remove_tree(path)
    for path in layout.partial.iterdir():
        if not is_partial(path):
            remove_tree(path)
        elif now - path.stat().st_mtime > PARTIAL_AGE_S_MAX:
            path.unlink()


def is_partial(path: Path) -> bool:
    return PARTIAL.fullmatch(path.name) is not None and path.is_file() and not path.is_symlink()


def load(layout: Layout) -> Found:
    found = Found()
    for path in records(layout.images):
        try:
            image = read_record(path, ImageRecord)
        except msgspec.DecodeError:
            found.is_whole = False
            continue
        if layout.image(image.digest) == path:
            found.images[image.digest] = image
    for path in records(layout.names):
        try:
            name = read_record(path, NameRecord)
        except msgspec.DecodeError:
            continue  # fsck says so
        if name_key(name.scope, name.platform, name.name) == path.stem:
            found.names[path.stem] = name
    for path in records(layout.cache):
        try:
            step = read_record(path, CacheRecord)
        except msgspec.DecodeError:
            path.unlink()  # only a cache
            continue
        found.cache[path.stem] = step
    for path in records(layout.roots):
        try:
            root = read_record(path, RootRecord)
        except msgspec.DecodeError:
            continue  # made anew when it is needed
        if root.key == path.stem and layout.root_file(root.key).is_file():
            found.roots[root.key] = root
    return found


def records(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.suffix == ".json" and HEX.fullmatch(path.stem))


def remove_tree(path: Path) -> None:
    """Of our own making, but for what somebody put there by hand: links are removed, not followed."""
    if path.is_dir() and not path.is_symlink():
        for each in path.iterdir():
            remove_tree(each)
        path.rmdir()
    else:
        path.unlink()
