"""The table of hostile archives: one row for each mechanism, with what must become of it.

A row is refused with a code, or it is harmless, and then this is the whole tree. Each row names the
defences that stop it; with any one of them switched off (the planted binary) its check must fail.
The defence `unpack` is that nothing is unpacked at all: switched off, entries are also written to
the host's file system as a naive unpacker would.
"""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.unit.images import tarballs as t
from tests.unit.images.converter import Layer, layer

Make = Callable[[Path], list[Layer]]
Tree = dict[bytes, str]
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One mechanism."""

    name: str
    make: Make
    expect: str | Tree | Callable[[Path], Tree]
    defences: tuple[str, ...]
    limits: dict[str, int] = field(default_factory=dict)
    with_agent: bool = False
    lost: dict[str, int] = field(default_factory=dict)


def one(*pieces: bytes, end: bytes = t.END) -> Make:
    """A single honest layer of these entries."""
    return lambda directory: [layer(directory, b"".join(pieces) + end)]


def many(*layers: bytes) -> Make:
    return lambda directory: [layer(directory, raw + t.END) for raw in layers]


def packed(blob: Callable[[], bytes], raw: bytes = b"", compression: str = "gzip") -> Make:
    """A blob that says what it likes about its content."""
    return lambda directory: [layer(directory, raw, compression=compression, packed=blob())]


def lying(raw: bytes, **lies: object) -> Make:
    def make(directory: Path) -> list[Layer]:
        return [dataclasses.replace(layer(directory, raw), **lies)]  # type: ignore[arg-type]

    return make


def _off_by(raw: bytes, count: int) -> Make:
    def make(directory: Path) -> list[Layer]:
        honest = layer(directory, raw)
        return [dataclasses.replace(honest, size=honest.size + count)]

    return make


def _absolute(directory: Path) -> bytes:
    return bytes(directory / "escaped")


def _parents(path: bytes) -> Tree:
    parts = path.strip(b"/").split(b"/")
    return {b"/".join(parts[:count]): "dir" for count in range(1, len(parts))}


GOOD = t.file(b"good", b"good")
PLAIN = GOOD + t.END
BOMB = t.gzip_repeated(bytes(MIB), 2)
LONG_FOLDER = b"/".join([b"d" * 250] * 15)

NAMES = [
    Row("dot-dot name", one(GOOD, t.file(b"../escaped", b"x")), "bad_name", ("dotdot", "unpack")),
    Row("dot-dot inside", one(t.folder(b"a"), t.file(b"a/../../escaped", b"x")), "bad_name", ("dotdot", "unpack")),
    Row("dot-dot by pax", one(t.pax((b"path", b"../escaped")), t.file(b"ok", b"x")), "bad_name", ("dotdot", "unpack")),
    Row("dot-dot by prefix", one(t.file(b"escaped", b"x", prefix=b"..")), "bad_name", ("dotdot", "unpack")),
    Row(
        "absolute name",
        lambda directory: one(t.pax((b"path", _absolute(directory))), t.file(b"short", b"x"))(directory),
        lambda directory: _parents(_absolute(directory)) | {_absolute(directory).strip(b"/"): "file:x"},
        ("unpack",),
    ),
    Row("empty name", one(t.file(b"", b"x")), "bad_name", ("root_folder",)),
    Row("root as a file", one(t.file(b"./", b"x")), "bad_name", ("root_folder",)),
    Row("root as a symlink", one(t.symlink(b".", b"/etc")), "bad_name", ("root_folder",)),
    Row("bad UTF-8", one(t.file(b"caf\xe9", b"x")), {b"caf\xe9": "file:x"}, ("bytes",)),
    Row("NUL by pax", one(t.pax((b"path", b"a\0b")), t.file(b"ok")), "bad_name", ("nul",)),
    Row("long component", one(t.pax((b"path", b"n" * 256)), t.file(b"ok")), "name_too_long", ("name_bytes",)),
    Row("long path", one(t.pax((b"path", b"dir/" * 60 + b"d" * 60)), t.file(b"ok")), "name_too_long", ("path_bytes",),
        {"path_bytes": 256}),
    Row("very deep", one(t.pax((b"path", b"d/" * 200)), t.file(b"ok")), "too_deep", ("depth",)),
    Row("parent is a file", one(t.file(b"a", b"x"), t.file(b"a/b", b"y")), "bad_name", ("file_parent",)),
]  # fmt: skip

LINKS = [
    Row(
        "write through a symlink",
        one(t.symlink(b"out", b"../.."), t.file(b"out/escaped", b"x")),
        {b"out": "symlink:../..", b"escaped": "file:x"},
        ("unpack",),
    ),
    Row(
        "write through an absolute symlink",
        lambda directory: one(
            t.pax((b"linkpath", bytes(directory))), t.symlink(b"out", b"short"), t.file(b"out/escaped", b"x")
        )(directory),
        lambda directory: {b"out": f"symlink:{directory}", _absolute(directory).strip(b"/"): "file:x"}
        | _parents(_absolute(directory)),
        ("unpack",),
    ),
    Row(
        "directory becomes a symlink, then written through",
        one(t.folder(b"d"), t.symlink(b"d", b"../.."), t.file(b"d/escaped", b"x")),
        {b"d": "symlink:../..", b"escaped": "file:x"},
        ("replace",),
    ),
    Row("symlink loop as a parent", one(t.symlink(b"a", b"b"), t.symlink(b"b", b"a"), t.file(b"a/x")), "bad_link",
        ("link_hops",)),
    Row("empty symlink", one(t.symlink(b"a", b"")), "bad_link", ("link_empty",)),
    Row("long symlink", one(t.pax((b"linkpath", b"l" * 5000)), t.symlink(b"a", b"b")), "name_too_long", ("link_bytes",)),
    Row("NUL in a link", one(t.pax((b"linkpath", b"l\0m")), t.symlink(b"a", b"b")), "bad_name", ("nul",)),
    Row("hard link out of the tree", one(t.hardlink(b"a", b"../../../canary")), "bad_link", ("link_dotdot", "unpack")),
    Row(
        "hard link to a host file",
        lambda directory: one(
            t.pax((b"linkpath", bytes(directory / "canary"))), t.hardlink(b"a", b"short")
        )(directory),
        "bad_link",
        ("link_missing", "unpack"),
    ),
    Row("hard link to a later entry", one(t.hardlink(b"a", b"b"), t.file(b"b", b"x")), "bad_link", ("link_missing",)),
    Row("hard link to itself", one(t.file(b"a", b"x"), t.hardlink(b"a", b"./a")), "bad_link", ("link_self",)),
    Row("hard link to a directory", one(t.folder(b"d"), t.hardlink(b"a", b"d")), "bad_link", ("link_folder",)),
    Row("hard link to the root", one(t.hardlink(b"a", b"/")), "bad_link", ("link_missing",)),
    Row(
        "hard link with content",
        one(t.file(b"a", b"x"), t.head(b"b", t.LINK, 512, link=b"a"), t.file(b"c", b"y")),
        {b"a": "file:x", b"b": "file:x", b"c": "file:y"},
        ("header_only",),
    ),
    Row(
        "one name of a hard link replaced later",
        many(t.file(b"a", b"old") + t.hardlink(b"b", b"a"), t.file(b"a", b"new")),
        {b"a": "file:new", b"b": "file:old"},
        ("inodes",),
    ),
]  # fmt: skip

TYPES = [
    Row("old GNU sparse", one(t.head(b"s", b"S", 512), bytes(512)), "unsupported_type", ("types",)),
    Row("pax sparse 0.0", one(t.pax((b"GNU.sparse.size", b"1099511627776"), (b"GNU.sparse.numblocks", b"0")),
        t.file(b"s")), "unsupported_type", ("sparse",)),
    Row("pax sparse 0.1", one(t.pax((b"GNU.sparse.map", b"0,1"), (b"GNU.sparse.name", b"../s")), t.file(b"s", b"x")),
        "unsupported_type", ("sparse",)),
    Row("pax sparse 1.0", one(t.pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"),
        (b"GNU.sparse.realsize", b"9" * 18)), t.file(b"s", b"0\n")), "unsupported_type", ("sparse",)),
    Row("volume header", one(t.head(b"v", b"V"), GOOD), "unsupported_type", ("types",)),
    Row("continued volume", one(t.head(b"m", b"M"), GOOD), "unsupported_type", ("types",)),
    Row("unknown type", one(t.head(b"z", b"\xff"), GOOD), "unsupported_type", ("types",)),
    Row("device node", one(t.head(b"null", t.CHAR, device=(1, 3))), {b"null": "char:1:3"}, ("unpack",)),
    Row("device number beyond Linux", one(t.head(b"n", t.DEVICE, device=(0o10000, 0))), "bad_size", ("device",)),
    Row("set-uid", one(t.file(b"su", b"x", mode=0o6755)), {b"su": "file:x@6755"}, ("mode_bits",)),
    Row("own /.cloche", one(t.folder(b".cloche"), t.file(b".cloche/agent", b"mine"), t.file(b".cloche/more", b"x")),
        {b".cloche": "dir", b".cloche/agent": "file:AGENT", b"dev": "dir", b"proc": "dir", b"sys": "dir",
         b"run": "dir", b"run/cloche": "dir",
         b"workspace": "dir", b"tmp": "dir@1777", b"tmp/.keep": "file:", b"etc": "dir", b"etc/machine-id": "file:",
         b"etc/hosts": "file:127.0.0.1 localhost\n::1 localhost\n"},
        ("reserved",), with_agent=True, lost={"reserved": 3}),
    Row("own /dev, and links where directories must be",
        one(t.folder(b"dev"), t.head(b"dev/mem", t.CHAR, device=(1, 1)), t.symlink(b"proc", b"/etc"),
            t.symlink(b"etc", b"../../../e")),
        {b".cloche": "dir", b".cloche/agent": "file:AGENT", b"dev": "dir", b"proc": "dir", b"sys": "dir",
         b"run": "dir", b"run/cloche": "dir",
         b"workspace": "dir", b"tmp": "dir@1777", b"tmp/.keep": "file:", b"etc": "symlink:../../../e", b"e": "dir",
         b"e/machine-id": "file:", b"e/hosts": "file:127.0.0.1 localhost\n::1 localhost\n"},
        ("dev",), with_agent=True, lost={"devices": 1, "replaced": 1}),
    Row("xattr flood", one(t.pax(*((b"SCHILY.xattr.user.%05d" % n + b"x" * 60, b"v") for n in range(8000))),
        t.file(b"a", b"x")), {b"a": "file:x"}, ("lost_examples",), lost={"xattrs": 8000}),
]  # fmt: skip

NUMBERS = [
    Row("negative octal size", one(t.head(b"a", size=b"-0000000001\0"), bytes(512)), "bad_size", ("overflow",)),
    Row("negative base-256 size", one(t.head(b"a", size=t.base256(-1, 12))), "bad_size", ("negative",)),
    Row("base-256 size beyond 64 bits", one(t.head(b"a", size=t.base256(1 << 70, 12))), "bad_size", ("overflow",)),
    Row("base-256 size of 2^63 - 1", one(t.head(b"a", size=t.base256((1 << 63) - 1, 12))), "too_large", ("size",)),
    Row("octal size beyond the archive", one(t.head(b"a", size=0o77777777777)), "too_large", ("size",)),
    Row("size beyond the archive", one(t.head(b"a", size=1 << 20)), "bad_archive", ("content_end",)),
    Row("size of letters", one(t.head(b"a", size=b"12345678x")), "bad_size", ("overflow",)),
    Row("pax size negative", one(t.pax((b"size", b"-1")), t.file(b"a")), "bad_size", ("pax_number",)),
    Row("pax size overflowing", one(t.pax((b"size", b"9" * 30)), t.file(b"a")), "bad_size", ("pax_number",)),
    Row("pax size over the header's", one(t.pax((b"size", b"3")), t.head(b"a"), t.padded(b"abc"), GOOD),
        {b"a": "file:abc", b"good": "file:good"}, ("pax_size",)),
    Row("owner beyond 32 bits", one(t.head(b"a", uid=t.base256(1 << 32, 8))), "bad_size", ("owner",)),
    Row("wrong checksum", one(t.head(b"a", checksum=1)), "bad_archive", ("checksum",)),
    Row("more bytes than may be", one(*(t.file(b"f%d" % n, bytes(MIB // 8)) for n in range(20))), "too_large",
        ("raw_bytes",), {"raw_bytes": MIB}),
    Row("no time", one(*(t.file(b"f%d" % n, b"x") for n in range(600))), "too_large", ("seconds",), {"seconds": 0}),
]  # fmt: skip

HEADERS = [
    Row("giant pax header", one(t.pax((b"comment", b"c" * (2 * MIB))), GOOD), "bad_archive", ("header_bytes",)),
    Row("pax length too long", one(t.extended(b"99 path=a\n", b"x"), GOOD), "bad_archive", ("pax_records",)),
    Row("pax length too short", one(t.extended(b"5 path=abc\n", b"x"), GOOD), "bad_archive", ("pax_records",)),
    Row("pax length of 30 digits", one(t.extended(b"9" * 30 + b" path=a\n", b"x"), GOOD), "bad_archive",
        ("pax_records",)),
    Row("pax header twice", one(t.pax((b"path", b"a")), t.pax((b"path", b"b")), GOOD), "bad_archive",
        ("header_chain",)),
    Row("pax header, then the end", one(t.pax((b"path", b"a"))), "bad_archive", ("truncation",)),
    Row("global pax path", one(t.pax((b"path", b"all"), kind=b"g"), GOOD), "bad_archive", ("pax_global",)),
    Row("flood of global headers", one(t.pax((b"comment", b"x"), kind=b"g") * 2000),
        "too_many_entries", ("entries",), {"entries": 1000}),
    Row("huge GNU long name", one(t.extended(b"n" * 2 * MIB, b"L"), GOOD), "bad_archive", ("header_bytes",)),
    Row("GNU long name without its end", one(t.extended(b"n" * 150, b"L"), t.file(b"x", b"x")),
        {b"n" * 150: "file:x"}, ("long_names",)),
    Row("chained GNU long names", one(*[t.extended(b"n\0", b"L")] * 3, GOOD), "bad_archive", ("header_chain",)),
    Row("GNU and pax name at once", one(t.extended(b"n\0", b"L"), t.pax((b"path", b"p")), GOOD), "bad_archive",
        ("named_twice",)),
    Row("half an end marker", one(GOOD, bytes(512), t.file(b"hidden", b"x")), "bad_archive", ("end_marker",)),
    Row("garbage behind the end", one(GOOD, t.END, t.file(b"hidden", b"x"), b"g" * 3 * MIB), {b"good": "file:good"},
        ("drain",)),
    Row("ends inside a header", one(GOOD, t.file(b"a")[:100], end=b""), "bad_archive", ("truncation",)),
]  # fmt: skip

MERGING = [
    Row("duplicate entries", one(t.file(b"a", b"1"), t.file(b"a", b"2")), {b"a": "file:2"}, ("replace",)),
    Row("file becomes a directory", many(t.file(b"a", b"1"), t.folder(b"a") + t.file(b"a/b", b"2")),
        {b"a": "dir", b"a/b": "file:2"}, ("replace",)),
    Row("directory becomes a file", many(t.folder(b"a") + t.file(b"a/b", b"1"), t.file(b"a", b"2")), {b"a": "file:2"},
        ("replace",)),
    Row("whiteout of nothing", one(t.file(b".wh.")), "bad_name", ("whiteout_names",)),
    Row("whiteout of .", one(t.file(b".wh..")), "bad_name", ("whiteout_names",)),
    Row("whiteout of ..", one(t.folder(b"d"), t.file(b"d/.wh...")), "bad_name", ("whiteout_names",)),
    Row("something below a whiteout", one(t.file(b".wh.a/b", b"x")), "bad_name", ("whiteout_names",)),
    Row("whiteout, then the same name", many(t.file(b"a", b"1"), t.file(b".wh.a") + t.file(b"a", b"2")),
        {b"a": "file:2"}, ("whiteout_names",)),
    Row("the same name, then its whiteout", many(t.file(b"a", b"1"), t.file(b"a", b"2") + t.file(b".wh.a")),
        {b"a": "file:2"}, ("whiteout_lower_only",)),
    Row("opaque root", many(t.file(b"a", b"1"), t.file(b"b", b"2") + t.file(b".wh..wh..opq")), {b"b": "file:2"},
        ("whiteout_lower_only", "whiteout_names")),
    Row("whiteout through a symlink", many(t.file(b"d/a", b"1") + t.symlink(b"l", b"../../d"), t.file(b"l/.wh.a")),
        {b"d": "dir", b"l": "symlink:../../d"}, ("whiteout_names",)),
    Row("aufs' own files", one(t.file(b".wh..wh.plnk/1.2", b"x"), t.file(b".wh..wh.aufs"), GOOD),
        {b"good": "file:good"}, ("whiteout_names",)),
]  # fmt: skip

FLOODS = [
    Row("ten million entries", packed(lambda: t.gzip_repeated(t.file(b"f") * 10_000, 1000)), "too_many_entries",
        ("entries",), {"entries": 50_000, "raw_bytes": 200 * MIB}),
    Row("directories nobody named", one(*(t.pax((b"path", b"%d/" % n + b"d/" * 100)) + t.file(b"f") for n in range(20))),
        "too_many_entries", ("entries",), {"entries": 1000}),
    Row("link targets", packed(lambda: t.gzip_repeated(
        (t.pax((b"linkpath", b"l" * 4000)) + t.symlink(b"a", b"b")) * 1000, 40)), "too_large", ("text_bytes",)),
    Row("paths made long by a symlink", one(
        t.pax((b"path", LONG_FOLDER)), t.folder(b"x"), t.pax((b"linkpath", LONG_FOLDER)), t.symlink(b"s", b"x"),
        *(t.file(b"s/%d" % n) for n in range(75_000))), "too_large", ("paths_bytes",)),
    Row("gzip bomb", packed(lambda: t.gzip_repeated(bytes(MIB), 150)), "ratio", ("ratio",), {"ratio": 100}),
    Row("zstd bomb", packed(lambda: t.zstd_zeros(200 * MIB), compression="zstd"), "ratio", ("ratio",)),
    Row("bomb as a file", one(t.file(b"bomb.gz", BOMB)), {b"bomb.gz": "file:" + BOMB[:64].decode(errors="replace")},
        ("unpack",)),
]  # fmt: skip

BLOBS = [
    Row("another digest", lying(PLAIN, digest="sha256:" + "0" * 64), "bad_digest", ("digest",)),
    Row("another diff_id", lying(PLAIN, diff_id="sha256:" + "0" * 64), "bad_digest", ("diff_id",)),
    Row("longer than said", _off_by(PLAIN, -1), "bad_length", ("length",)),
    Row("shorter than said", _off_by(PLAIN, 1), "bad_length", ("length",)),
    Row("truncated gzip", packed(lambda: gzip.compress(PLAIN, mtime=0)[:-9], PLAIN), "bad_compression",
        ("compression_end",)),
    Row("empty gzip", packed(lambda: b""), "bad_compression", ("compression_end",)),
    Row("garbage behind gzip", packed(lambda: gzip.compress(PLAIN, mtime=0) + b"garbage", PLAIN), "bad_compression",
        ("compression_garbage",)),
    Row("gzip members", packed(lambda: gzip.compress(PLAIN[:700], mtime=0) + gzip.compress(PLAIN[700:], mtime=0), PLAIN),
        {b"good": "file:good"}, ("members",)),
]  # fmt: skip

TABLE = [*NAMES, *LINKS, *TYPES, *NUMBERS, *HEADERS, *MERGING, *FLOODS, *BLOBS]
