"""The converter's three jobs on honest archives, its protocol, and its walls."""

from __future__ import annotations

import array
import contextlib
import gzip
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.unit.images import converter
from tests.unit.images import tarballs as t
from tests.unit.images.converter import Ended, Layer, layer
from tests.unit.images.erofs import Erofs, told

MIB = 1 << 20
OPAQUE = (b"SCHILY.xattr.trusted.overlay.opaque", b"y")


def _image(directory: Path, layers: list[Layer], **options: Any) -> Ended:
    with (directory / "output").open("w+b") as output, (directory / "scratch").open("w+b") as scratch:
        return converter.image(layers, output, scratch, **options)


def _tree(directory: Path) -> dict[bytes, str]:
    image = Erofs(directory / "output")
    return {path: told(image, inode) for path, inode in image.walk() if path}


# ------------------------------------------------------------------------------------------- image


@pytest.mark.parametrize(
    ("compression", "pack"),
    [
        ("none", lambda raw: raw),
        ("gzip", lambda raw: gzip.compress(raw, mtime=0)),
        ("zstd", t.zstd_stored),
        ("zstd", lambda raw: t.zstd_stored(raw[:1000]) + b"\x50\x2a\x4d\x18\x03\0\0\0abc" + t.zstd_stored(raw[1000:])),
    ],
    ids=["none", "gzip", "zstd", "zstd frames and a skippable one"],
)
def test_compressions(compression: str, pack: Any, tmp_path: Path) -> None:
    raw = t.file(b"a", b"content") + t.file(b"b", b"x" * 300_000) + t.END
    ended = _image(tmp_path, [layer(tmp_path, raw, compression=compression, packed=pack(raw))])
    assert ended.done is not None, ended.refused
    assert _tree(tmp_path)[b"a"] == "file:content"
    assert ended.done["raw_bytes"] == len(raw)
    assert ended.done["entries"] == 2


@pytest.mark.parametrize(
    "blob",
    [t.ZSTD_MAGIC + b"\x00\xff" + bytes(20), t.zstd_stored(bytes(2000))[:-10], b"", b"not zstd at all"],
    ids=["window of terabytes", "truncated", "empty", "garbage"],
)
def test_bad_zstd(blob: bytes, tmp_path: Path) -> None:
    ended = _image(tmp_path, [layer(tmp_path, b"", compression="zstd", packed=blob)])
    assert ended.code == "bad_compression"


@pytest.mark.req("IMG-2")
def test_same_input_same_bytes(tmp_path: Path) -> None:
    raw = t.file(b"z", b"1", mtime=5) + t.folder(b"d") + t.file(b"d/x", b"2") + t.hardlink(b"a", b"z") + t.END
    other = b"".join([t.folder(b"d"), t.file(b"d/x", b"2"), t.file(b"a", b"1", mtime=5), t.hardlink(b"z", b"a"), t.END])
    hashes = set()
    for each in (raw, raw, other):
        ended = _image(tmp_path, [layer(tmp_path, each)], agent=converter.CONVERTER)
        assert ended.done is not None, ended.refused
        assert ended.done["root_sha256"] == converter.file_digest(tmp_path / "output").removeprefix("sha256:")
        hashes.add(ended.done["root_sha256"])
    assert len(hashes) == 1, "the order of entries is not to be seen in the result"


def test_what_every_root_gets(tmp_path: Path) -> None:
    raw = t.file(b"etc/hosts", b"") + t.file(b"etc/machine-id", b"mine") + t.folder(b"workspace", 0o700) + t.END
    assert _image(tmp_path, [layer(tmp_path, raw)], agent=converter.CONVERTER).done is not None
    image = Erofs(tmp_path / "output")
    tree = image.tree()
    agent = tree[b".cloche/agent"]
    assert image.content(agent) == converter.CONVERTER.read_bytes()
    assert (agent.mode & 0o7777, agent.uid, agent.gid) == (0o555, 64000, 64000)
    assert image.content(tree[b"etc/hosts"]).startswith(b"127.0.0.1 localhost")
    assert image.content(tree[b"etc/machine-id"]) == b"mine"
    assert tree[b"workspace"].mode & 0o7777 == 0o700
    assert tree[b"workspace"].uid == 0
    assert tree[b"tmp"].mode & 0o7777 == 0o1777
    assert {b"proc", b"sys", b"dev", b"tmp/.keep"} <= set(tree)


def test_times_owners_and_large_numbers(tmp_path: Path) -> None:
    raw = (
        t.pax((b"mtime", b"1700000000.123456789"), (b"uid", b"3000000000"), (b"gid", b"70000"))
        + t.file(b"a", b"x")
        + t.pax((b"mtime", b"-1.5"))
        + t.file(b"b")
        + t.file(b"c", mtime=0o77777777777)
        + t.END
    )
    assert _image(tmp_path, [layer(tmp_path, raw)]).done is not None
    tree = Erofs(tmp_path / "output").tree()
    a, b, c = tree[b"a"], tree[b"b"], tree[b"c"]
    assert (a.seconds, a.nanos, a.uid, a.gid) == (1700000000, 123456789, 3_000_000_000, 70000)
    assert (b.seconds, b.nanos) == (-2, 500_000_000)
    assert c.seconds == 0o77777777777


def test_progress_is_told_and_bounded(tmp_path: Path) -> None:
    piece = t.file(b"f", os.urandom(MIB)) * 16
    blob = t.gzip_repeated(piece, 16)
    raw_hash = hashlib.sha256()
    for _ in range(16):
        raw_hash.update(piece)
    made = layer(tmp_path, b"", packed=blob)
    made = Layer(made.blob, "gzip", made.size, made.digest, "sha256:" + raw_hash.hexdigest())
    ended = _image(tmp_path, [made])
    assert ended.done is not None, ended.refused
    told_bytes = [each["bytes"] for each in ended.progress]
    assert told_bytes == sorted(told_bytes)
    assert all(each["layer"] == 0 and each["bytes"] <= len(blob) for each in ended.progress)


def test_no_space_and_size_limit(tmp_path: Path) -> None:
    made = layer(tmp_path, t.file(b"a", os.urandom(3 * MIB)) + t.END)
    with (tmp_path / "output").open("w+b") as output, open("/dev/full", "r+b") as full:
        assert converter.image([made], output, full).code == "no_space"
    assert _image(tmp_path, [made], file_bytes_max=MIB).code == "too_large"
    assert (tmp_path / "scratch").stat().st_size <= MIB


@pytest.mark.parametrize("mkfs", ["/bin/false", "/nonexistent"])
def test_mkfs_that_fails(mkfs: str, tmp_path: Path) -> None:
    made = layer(tmp_path, t.file(b"a", os.urandom(3 * MIB)) + t.END)
    assert _image(tmp_path, [made], mkfs=Path(mkfs)).code == "mkfs_failed"


def test_a_full_output_is_no_silent_hole(tmp_path: Path) -> None:
    """The scratch file fits and the root does not: mkfs.erofs must notice, and so must we."""
    raw = b"".join(t.file(b"f%d" % n, b"x") for n in range(500)) + t.END
    ended = _image(tmp_path, [layer(tmp_path, raw)], file_bytes_max=600 * 1024)
    assert ended.code == "mkfs_failed"


# ----------------------------------------------------------------------------------------- protocol


@pytest.mark.parametrize(
    ("message", "descriptors"),
    [
        (b"", 1),
        (b"\xff\xff\xff\xff", 1),
        (b"\x02\0\0\0{}", 1),
        (b"\x04\0\0\0null", 2),
        (b"\x10\0\0\0{", 1),
    ],
    ids=["nothing", "4 GiB of job", "no job", "null", "ends early"],
)
def test_bad_jobs(message: bytes, descriptors: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, open("/dev/null", "rb") as null:
        with theirs:
            process = subprocess.Popen([converter.CONVERTER, converter.MKFS], stdin=theirs, stderr=subprocess.DEVNULL)
        if message:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null.fileno()] * descriptors))
            ours.sendmsg([message], [rights])
        ours.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):  # it ended without reading all of it
            assert ours.recv(1000) == b""
        assert process.wait(10) == 2


def test_wrong_number_of_descriptors(tmp_path: Path) -> None:
    job = {"job": "index", "limits": converter.LIMITS, "hash": True}
    with open("/dev/null", "rb") as null:
        ended = converter.run(job, [null.fileno()])
    assert (ended.status, ended.done, ended.refused) == (2, None, None)


# -------------------------------------------------------------------------------------------- walls


@pytest.mark.req("ISO-3")
def test_nothing_is_opened_or_started_after_the_filter(tmp_path: Path) -> None:
    """The planted worker tries to write a file while the filter is on, and dies of it."""
    made = layer(tmp_path, t.file(bytes(tmp_path / "escaped")[:90], b"x") + t.END)
    ended = _image(tmp_path, [made], program=converter.planted_program(), planted="open")
    assert ended.status == -signal.SIGSYS
    assert (ended.done, ended.refused) == (None, None)


def test_system_calls_of_a_whole_run(tmp_path: Path) -> None:
    """As strace sees it: after the filter nobody opens, executes or connects but mkfs.erofs, once."""
    trace = tmp_path / "trace"
    made = layer(tmp_path, t.file(b"a", os.urandom(MIB)) + t.END)
    calls = "openat,open,execve,socket,connect,clone,clone3,fork,vfork,unlink,unlinkat,rename,mkdir,ptrace,seccomp"
    ended = _image(tmp_path, [made], prefix=["strace", "-f", "-o", str(trace), "-e", f"trace={calls}"])
    assert ended.done is not None
    lines = [line for line in trace.read_text().splitlines() if "(" in line and "resumed" not in line]
    at = [number for number, line in enumerate(lines) if "seccomp(" in line]
    assert len(at) == 2, "one filter for mkfs.erofs, one for the worker"
    worker = lines[0].split()[0]
    after = [line for line in lines[at[0] + 1 :] if "seccomp(" not in line]
    assert [line for line in after if line.startswith(worker)] == [line for line in after if "CLONE_THREAD" in line]
    opened = [line for line in after if "open" in line]
    assert len(opened) == 1, opened
    assert '"/proc/self/fd/3"' in opened[0]


# -------------------------------------------------------------------------------------------- upper


UPPER = b"".join(
    [
        t.folder(b"."),
        t.folder(b"etc"),
        t.file(b"etc/conf", b"new", mtime=7),
        t.head(b"etc/gone", t.CHAR, device=(0, 0)),
        t.hardlink(b"gone", b"etc/gone"),
        t.pax(OPAQUE),
        t.folder(b"srv", 0o750),
        t.pax((b"SCHILY.xattr.user.note", b"v")),
        t.file(b"srv/z", b"linked"),
        t.hardlink(b"srv/a", b"srv/z"),
        t.symlink(b"srv/s", b"../x"),
        t.head(b"srv/null", t.CHAR, device=(1, 3)),
        t.folder(b".cloche"),
        t.file(b".cloche/agent", b"ours"),
        t.END,
    ]
)
LAYER = [
    ("etc", "5"), ("etc/conf", "0"), ("etc/.wh.gone", "0"), (".wh.gone", "0"), ("srv", "5"), ("srv/.wh..wh..opq", "0"),
    ("srv/a", "0"), ("srv/null", "3"), ("srv/s", "2"), ("srv/z", "1"),
]  # fmt: skip


def _upper(directory: Path, raw: bytes, *, pipe: bool = False, **options: Any) -> Ended:
    with (directory / "layer").open("w+b") as output:
        if not pipe:
            (directory / "raw").write_bytes(raw)
            with (directory / "raw").open("rb") as source:
                return converter.upper(source.fileno(), output, **options)
        reading, writing = os.pipe()
        feeder = threading.Thread(target=lambda: (os.write(writing, raw), os.close(writing)))
        feeder.start()
        try:
            return converter.upper(reading, output, **options)
        finally:
            feeder.join()
            os.close(reading)


@pytest.mark.parametrize("compression", ["none", "gzip"])
@pytest.mark.parametrize("pipe", [False, True], ids=["file", "pipe"])
def test_upper_becomes_a_layer(compression: str, pipe: bool, tmp_path: Path) -> None:
    ended = _upper(tmp_path, UPPER, pipe=pipe, compression=compression, drop=["/.cloche"])
    assert ended.done is not None, ended.refused
    packed = (tmp_path / "layer").read_bytes()
    raw = gzip.decompress(packed) if compression == "gzip" else packed
    assert ended.done == {
        "digest": converter.digest(packed),
        "size": len(packed),
        "diff_id": converter.digest(raw),
        "raw_bytes": len(raw),
        "entries": len(LAYER),
    }
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        members = archive.getmembers()
        assert sorted((each.name, each.type.decode()) for each in members) == sorted(LAYER)
        names = [each.name for each in members]
        assert all("/" not in name or names.index(name.rpartition("/")[0]) < names.index(name) for name in names)
        assert archive.getmember("srv/z").linkname == "srv/a"
        assert archive.getmember("etc/conf").mtime == 7
        assert not any(each.pax_headers for each in members)


def test_an_upper_over_its_image_is_what_the_sandbox_saw(tmp_path: Path) -> None:
    lower = t.file(b"etc/gone", b"1") + t.file(b"gone", b"1") + t.file(b"srv/old", b"1") + t.file(b"kept", b"1") + t.END
    assert _upper(tmp_path, UPPER, compression="gzip", drop=[".cloche"]).done is not None
    packed = (tmp_path / "layer").read_bytes()
    above = layer(tmp_path, gzip.decompress(packed), packed=packed)
    assert _image(tmp_path, [layer(tmp_path, lower), above]).done is not None
    assert _tree(tmp_path) == {
        b"etc": "dir", b"etc/conf": "file:new", b"kept": "file:1", b"srv": "dir", b"srv/a": "file:linked",
        b"srv/z": "file:linked", b"srv/s": "symlink:../x", b"srv/null": "char:1:3",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (t.file(b".wh.passwd"), "bad_name"),
        (t.file(b"../x"), "bad_name"),
        (t.hardlink(b"a", b"b"), "bad_link"),
        (t.head(b"n" * 99, t.CHAR), None),
        (t.pax((b"path", b"n" * 255)) + t.head(b"n", t.CHAR), "name_too_long"),
        (t.file(b"a", b"x" * 600)[:1000], "bad_archive"),
        (t.head(b"a", size=1 << 30), "bad_archive"),
    ],
)
def test_a_hostile_upper(raw: bytes, code: str | None, tmp_path: Path) -> None:
    ended = _upper(tmp_path, raw)
    assert ended.code == code, ended
    assert ended.status == 0


# -------------------------------------------------------------------------------------------- index


def _index(directory: Path, raw: bytes, **options: Any) -> tuple[Ended, list[dict[str, Any]]]:
    (directory / "raw").write_bytes(raw)
    with (directory / "lines").open("w+b") as output, (directory / "raw").open("rb") as source:
        ended = converter.index(source.fileno(), output, **options)
        output.seek(0)
        return ended, [json.loads(line) for line in output] if ended.done else []


def test_index(tmp_path: Path) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind, data, link in [
            ("./dir/", tarfile.DIRTYPE, b"", ""),
            ("dir/größe", tarfile.REGTYPE, b"x" * 70_000, ""),
            ("l" * 200, tarfile.SYMTYPE, b"", "/anything"),
            ("h", tarfile.LNKTYPE, b"", "./dir/größe"),
            ("dir/größe", tarfile.REGTYPE, b"again", ""),
        ]:
            entry = tarfile.TarInfo(name)
            entry.type, entry.size, entry.linkname, entry.mtime = kind, len(data), link, 12.5
            archive.addfile(entry, io.BytesIO(data))
    raw = made.getvalue()
    ended, lines = _index(tmp_path, raw)
    assert ended.done is not None, ended.refused
    assert ended.done["entries"] == len(lines) == 5
    assert [line["path"] for line in lines] == ["dir", "dir/größe", "l" * 200, "h", "dir/größe"]
    assert [line["type"] for line in lines] == ["dir", "file", "symlink", "hardlink", "file"]
    assert [line["link"] for line in lines] == [None, None, "/anything", "dir/größe", None]
    for line in lines:
        assert line["mtime"] == 12.5
        data = raw[line["offset"] : line["offset"] + line["size"]]
        assert line["sha256"] == (hashlib.sha256(data).hexdigest() if line["type"] == "file" else None)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (t.file(b"../x"), "bad_name"),
        (t.file(b"caf\xe9"), "bad_name"),
        (t.hardlink(b"a", b"../b"), "bad_link"),
        (t.symlink(b"a", b""), "bad_link"),
        (t.head(b"a", b"S"), "unsupported_type"),
        (t.head(b"a", size=t.base256(-1, 12)), "bad_size"),
        (t.head(b"a", size=1 << 20), "bad_archive"),
        (t.file(b"a") * 2000, "too_many_entries"),
        (b"not a tar at all" * 64, "bad_archive"),
    ],
)
def test_a_hostile_index(raw: bytes, code: str, tmp_path: Path) -> None:
    ended, _ = _index(tmp_path, raw + t.END, limits={"entries": 1000})
    assert ended.code == code


def test_an_index_in_a_file_too_small(tmp_path: Path) -> None:
    ended, _ = _index(tmp_path, t.file(b"a") * 5000 + t.END, file_bytes_max=64 * 1024)
    assert ended.code == "too_large"


# ------------------------------------------------------------------------------------------ memory


@pytest.mark.long
def test_a_million_entries_fit_a_gibibyte(tmp_path: Path) -> None:
    """Worker and mkfs.erofs together, in half of it each."""
    blob = tmp_path / "blob"
    raw_hash = hashlib.sha256()
    with gzip.open(blob, "wb", compresslevel=1) as packed:
        for top in range(1000):
            piece = b"".join([t.folder(b"d%04d" % top), *(t.file(b"d%04d/name-%06d" % (top, n)) for n in range(998))])
            raw_hash.update(piece)
            packed.write(piece)
    diff_id = "sha256:" + raw_hash.hexdigest()
    made = Layer(blob, "gzip", blob.stat().st_size, converter.file_digest(blob), diff_id)
    ended = _image(tmp_path, [made], limits={"entries": 1_000_000, "ratio": 10_000}, memory_bytes_max=512 * MIB)
    assert ended.done is not None, (ended.refused, ended.log)
    assert ended.done["entries"] == 999_000
