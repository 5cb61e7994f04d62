"""What a converter answers, from bytes to checked values. Pure. The converter has read hostile bytes, so its word is hostile too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cloche.wire.errors import ClocheError, error
from cloche_server.images.reference import shown

FRAME_BYTES_MAX: Final = 64 * 1024
LENGTH_BYTES: Final = 4
NUMBER_MAX: Final = (1 << 53) - 1
LOST_KEYS_MAX: Final = 32
LOST_EXAMPLES_MAX: Final = 20
TEXT_MAX: Final = 500
LINE_BYTES_MAX: Final = 64 * 1024
"""Of an index: two paths of 4096 bytes, each byte written as an escape, and the numbers."""

TOO_LARGE: Final = frozenset({"too_large", "too_many_entries", "ratio", "no_space"})
CORRUPT: Final = frozenset({"bad_digest", "bad_length"})
REFUSED: Final = frozenset(
    {
        "bad_archive",
        "too_deep",
        "name_too_long",
        "bad_name",
        "bad_link",
        "bad_size",
        "bad_compression",
        "unsupported_type",
        "mkfs_failed",
    }
)
TYPES: Final = frozenset({"file", "dir", "symlink", "hardlink", "char", "block", "fifo"})
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_KEY: Final = re.compile(r"[a-z][a-z_]{0,39}")


class Lie(Exception):
    """The worker broke its contract."""


@dataclass(frozen=True)
class RootMade:
    """One EROFS file, made from all layers."""

    root_bytes: int
    root_sha256: str
    entries: int
    raw_bytes: int
    lost: dict[str, Any]


@dataclass(frozen=True)
class LayerMade:
    """One OCI layer, made from a sandbox's writable layer."""

    digest: str
    size: int
    diff_id: str
    raw_bytes: int
    entries: int


@dataclass(frozen=True)
class Entry:
    """One entry of a tar; `offset` is where its bytes begin in the file."""

    path: str
    type: str
    mode: int
    uid: int
    gid: int
    mtime: float
    size: int
    offset: int
    link: str | None
    sha256: str | None


_entry: Final = msgspec.json.Decoder(Entry)


class Frames:
    """Cuts what comes into messages. Lie when one is too long, is no table, or when there are too many."""

    def __init__(self, messages_max: int) -> None:
        self._left = messages_max
        self._unread = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        self._unread += data
        while len(self._unread) >= LENGTH_BYTES:
            length = int.from_bytes(self._unread[:LENGTH_BYTES], "little")
            if length > FRAME_BYTES_MAX:
                raise Lie(f"a message of {length} bytes")
            if len(self._unread) < LENGTH_BYTES + length:
                return
            text = bytes(self._unread[LENGTH_BYTES : LENGTH_BYTES + length])
            del self._unread[: LENGTH_BYTES + length]
            self._left -= 1
            if self._left < 0:
                raise Lie("too many messages")
            yield _table(text)


def _table(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Lie("a message that is not JSON") from None
    if not isinstance(value, dict) or len(value) != 1:
        raise Lie("a message that is not a table with one name")
    return value


def progress_of(body: Any, layers: int) -> tuple[int, int]:
    fields = _fields(body)
    return number(fields, "layer", layers), number(fields, "bytes")


def refusal_of(body: Any) -> ClocheError:
    """Of the image, by the worker: a code of the closed list, with texts that are safe to show."""
    fields = _fields(body)
    code = _text(fields, "code")
    if code not in TOO_LARGE | CORRUPT | REFUSED:
        raise Lie(f"an unknown refusal: {shown(code, 40)}")
    layer = None if fields.get("layer") is None else number(fields, "layer", NUMBER_MAX)
    entry = None if fields.get("entry") is None else shown(_text(fields, "entry"), TEXT_MAX)
    where = "" if layer is None else f" in layer {layer}"
    named = "" if entry is None else f" at {entry!r}"
    message = f"The image is refused{where}{named}: {shown(_text(fields, 'message'), TEXT_MAX)}"
    detail = {"reason": code, "layer": layer, "entry": entry}
    if code == "no_space":
        return error("image_too_large", message, detail=detail, fix="Free space on the node's disk: cloche image gc")
    public = "image_too_large" if code in TOO_LARGE else "image_corrupt" if code in CORRUPT else "image_refused"
    return error(public, message, detail=detail)


def root_of(body: Any, file_bytes: int) -> RootMade:
    """`file_bytes` is what the output really has."""
    fields = _fields(body)
    made = RootMade(
        root_bytes=number(fields, "root_bytes"),
        root_sha256=_matched(fields, "root_sha256", _HEX),
        entries=number(fields, "entries"),
        raw_bytes=number(fields, "raw_bytes"),
        lost=_lost(fields.get("lost")),
    )
    if made.root_bytes != file_bytes or file_bytes == 0:
        raise Lie(f"a root of {made.root_bytes} bytes in a file of {file_bytes}")
    return made


def layer_of(body: Any, file_bytes: int) -> LayerMade:
    fields = _fields(body)
    made = LayerMade(
        digest=_matched(fields, "digest", _DIGEST),
        size=number(fields, "size"),
        diff_id=_matched(fields, "diff_id", _DIGEST),
        raw_bytes=number(fields, "raw_bytes"),
        entries=number(fields, "entries"),
    )
    if made.size != file_bytes or file_bytes == 0:
        raise Lie(f"a layer of {made.size} bytes in a file of {file_bytes}")
    return made


def number(fields: dict[str, Any], name: str, most: int = NUMBER_MAX) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise Lie(f"{name}: not a number up to {most}")
    return value


def _fields(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise Lie("an answer that is not a table")
    return body


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise Lie(f"{name}: not a text")
    return value


def _matched(fields: dict[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = _text(fields, name)
    if not pattern.fullmatch(value):
        raise Lie(f"{name}: does not match {pattern.pattern}")
    return value


def _lost(value: Any) -> dict[str, Any]:
    """What the root does not have of the image: counts by name, and a few examples."""
    fields = _fields(value)
    if len(fields) > LOST_KEYS_MAX:
        raise Lie("lost: too many names")
    found: dict[str, Any] = {}
    for name, each in fields.items():
        if not _KEY.fullmatch(name):
            raise Lie("lost: a name that is none")
        if isinstance(each, list):
            if len(each) > LOST_EXAMPLES_MAX or not all(isinstance(text, str) for text in each):
                raise Lie(f"lost: {name}: not a few texts")
            found[name] = [shown(text, TEXT_MAX) for text in each]
        else:
            found[name] = number(fields, name)
    return found


# -------------------------------------------------------------------------------------------- index


def entry_of(line: bytes, file_bytes: int, path_bytes_max: int) -> Entry:
    """One line of an index of a tar that has `file_bytes`."""
    try:
        found = _entry.decode(line)
    except (msgspec.DecodeError, RecursionError) as bad:
        raise Lie(f"a line of the index: {shown(str(bad), 100)}") from None
    if found.path or found.type != "dir":  # the root itself has an empty path
        _check_path(found.path, path_bytes_max)
    sizes = (found.mode, found.uid, found.gid, found.size, found.offset)
    if found.type not in TYPES or min(sizes) < 0 or found.mode > 0o7777 or max(found.uid, found.gid) >= 1 << 32:
        raise Lie("a line of the index: numbers or type out of range")
    if found.type == "file" and found.offset + found.size > file_bytes:
        raise Lie("a line of the index: bytes beyond the archive")
    if found.type in ("symlink", "hardlink") and (found.link is None or len(found.link) > path_bytes_max):
        raise Lie("a line of the index: a link to nothing")
    if found.type == "hardlink" and found.link is not None:
        _check_path(found.link, path_bytes_max)
    if found.sha256 is not None and not _HEX.fullmatch(found.sha256):
        raise Lie("a line of the index: sha256")
    return found


def _check_path(path: str, bytes_max: int) -> None:
    """Relative and normal: nobody who joins it to a directory leaves that directory."""
    if "\0" in path or len(path.encode(errors="replace")) > bytes_max:
        raise Lie("a line of the index: a path that is none")
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise Lie("a line of the index: a path that is not normal")
