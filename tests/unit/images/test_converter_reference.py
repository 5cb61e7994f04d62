"""The converter against the reference unpacker: the same image through `umoci unpack` and through us.

Layers come from three hands: GNU tar, umoci's own repacking, and bytes for what neither writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.images import converter
from tests.unit.images import tarballs as t
from tests.unit.images.erofs import Erofs, Inode

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="owners and device nodes of the reference need root"),
    pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is the reference"),
]
LONG = "a-name-of-exactly-" + "x" * 182
WHEN = 1_600_000_000_123_456_789


def umoci(*arguments: str | Path) -> None:
    subprocess.run(["umoci", *map(str, arguments)], check=True, capture_output=True)


def _base(root: Path) -> None:
    """What GNU tar packs."""
    for folder in ("etc", "usr/lib", "usr/bin", "opaque/inner", "both", f"deep/{LONG}"):
        (root / folder).mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    (root / "dangling").symlink_to("/nowhere/" + "y" * 150)
    for name in ("one", "two", "opaque/old", "opaque/inner/old", "etc/removed", "usr/bin/su", "turns"):
        (root / name).write_text(f"content of {name}\n" * 50)
    os.link(root / "one", root / "linked")
    os.link(root / "two", root / "usr/lib/linked")
    (root / f"deep/{LONG}/{LONG}").write_text("long\n")
    os.chmod(root / "usr/bin/su", 0o4755)
    os.chmod(root / "both", 0o2775)
    os.chown(root / "etc", 1234, 4321)
    os.chown(root / "two", 70_000, 3_000_000_000)
    os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.mknod(root / "disk", 0o660 | stat.S_IFBLK, os.makedev(259, 300))
    os.mkfifo(root / "pipe")
    for number, path in enumerate(sorted(root.rglob("*"), reverse=True)):
        os.utime(path, ns=(0, WHEN + number * 1_000_000_007), follow_symlinks=False)


def _change(root: Path) -> None:
    """What umoci packs as the difference: whiteouts, replaced names of hard links, changed kinds."""
    (root / "one").unlink()
    (root / "one").write_text("another one\n")
    (root / "etc/removed").unlink()
    (root / "usr/lib/linked").unlink()
    (root / "turns").unlink()
    (root / "turns").mkdir()
    (root / "turns/inside").write_text("inside\n")
    shutil.rmtree(root / "deep")
    (root / "deep").write_text("a file now\n")
    os.chmod(root / "both", 0o700)


RAW = b"".join(
    [
        t.file(b"opaque/new", b"new", mtime=5),
        t.file(b"opaque/.wh..wh..opq"),
        t.file(b"both/x", b"1"),
        t.file(b"both/x", b"2", mode=0o600),
        t.file(b"lib/through", b"through the link", uid=7),
        t.hardlink(b"again", b"lib/through"),
        t.pax((b"mtime", b"1234567890.987654321"), (b"path", b"both/" + b"p" * 200)),
        t.file(b"short", b"pax"),
        t.file(b"two"),
        t.file(b".wh.two"),
        t.END,
    ]
)


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    made, bundle, packed = tmp_path / "layout", tmp_path / "bundle", tmp_path / "base.tar"
    umoci("init", "--layout", made)
    umoci("new", "--image", f"{made}:x")
    base = tmp_path / "base"
    base.mkdir()
    _base(base)
    subprocess.run(
        ["tar", "--create", "--format=pax", "--numeric-owner", "--xattrs", f"--file={packed}", "-C", base, "."],
        check=True,
    )
    umoci("raw", "add-layer", "--image", f"{made}:x", packed)
    umoci("unpack", "--image", f"{made}:x", bundle)
    _change(bundle / "rootfs")
    umoci("repack", "--image", f"{made}:x", bundle)
    raw = tmp_path / "raw.tar"
    raw.write_bytes(RAW)
    umoci("raw", "add-layer", "--image", f"{made}:x", raw)
    return made


def _layers(layout: Path) -> list[converter.Layer]:
    def blob(digest: str) -> Path:
        return layout / "blobs" / digest.replace(":", "/")

    index = json.loads((layout / "index.json").read_text())
    manifest = json.loads(blob(index["manifests"][0]["digest"]).read_text())
    config = json.loads(blob(manifest["config"]["digest"]).read_text())
    return [
        converter.Layer(
            blob(each["digest"]),
            "gzip" if each["mediaType"].endswith("+gzip") else "none",
            each["size"],
            each["digest"],
            diff_id,
        )
        for each, diff_id in zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True)
    ]


def _unpacked(root: Path) -> Iterator[tuple[bytes, tuple[Any, ...]]]:
    groups: dict[int, bytes] = {}
    for path in sorted(root.rglob("*"), key=bytes):
        name = bytes(path.relative_to(root))
        found = path.lstat()
        content: Any = None
        if stat.S_ISREG(found.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(found.st_mode):
            content = os.readlink(path)
        elif not stat.S_ISDIR(found.st_mode) and not stat.S_ISFIFO(found.st_mode):
            content = (os.major(found.st_rdev), os.minor(found.st_rdev))
        first = name if stat.S_ISDIR(found.st_mode) else groups.setdefault(found.st_ino, name)
        yield name, (found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns, first, content)


def _converted(image: Erofs) -> Iterator[tuple[bytes, tuple[Any, ...]]]:
    groups: dict[int, bytes] = {}

    def content(inode: Inode) -> Any:
        if inode.kind == "file":
            return hashlib.sha256(image.content(inode)).hexdigest()
        if inode.kind == "symlink":
            return image.content(inode).decode()
        return inode.device if inode.kind in ("char", "block") else None

    for name, inode in sorted(image.walk()):
        if name:
            first = name if inode.kind == "dir" else groups.setdefault(inode.number, name)
            nanoseconds = inode.seconds * 1_000_000_000 + inode.nanos
            yield name, (inode.mode, inode.uid, inode.gid, nanoseconds, first, content(inode))


@pytest.mark.req("IMG-2")
def test_the_tree_is_umocis(layout: Path, tmp_path: Path) -> None:
    """Names, kinds, modes, owners, times to the nanosecond, hard links, devices and contents."""
    reference = tmp_path / "reference"
    umoci("unpack", "--image", f"{layout}:x", reference)
    with (tmp_path / "output").open("w+b") as output, (tmp_path / "scratch").open("w+b") as scratch:
        ended = converter.image(_layers(layout), output, scratch)
    assert ended.done is not None, ended.refused
    expected, found = dict(_unpacked(reference / "rootfs")), dict(_converted(Erofs(tmp_path / "output")))
    assert set(found) == set(expected)
    assert {name: found[name] for name in found if found[name] != expected[name]} == {}
    assert len(found) > 20


def test_the_kernel_reads_it_too(layout: Path, tmp_path: Path) -> None:
    """Our own reader of EROFS is only as good as this."""
    with (tmp_path / "output").open("w+b") as output, (tmp_path / "scratch").open("w+b") as scratch:
        assert converter.image(_layers(layout), output, scratch).done is not None
    place = tmp_path / "mounted"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "erofs", "-o", "loop,ro", tmp_path / "output", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"EROFS cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        assert dict(_unpacked(place)) == dict(_converted(Erofs(tmp_path / "output")))
    finally:
        subprocess.run(["umount", place], check=True)


def test_layers_of_buildah(tmp_path: Path) -> None:
    """An image that buildah committed, from scratch, with the driver that needs nothing."""
    if shutil.which("buildah") is None:
        pytest.skip("buildah is not installed")
    store = ["--root", str(tmp_path / "store"), "--runroot", str(tmp_path / "run"), "--storage-driver", "vfs"]

    def buildah(*arguments: str) -> str:
        made = subprocess.run(["buildah", *store, *arguments], check=True, capture_output=True, text=True)
        return made.stdout.strip()

    (tmp_path / "context").mkdir()
    (tmp_path / "context/file").write_text("from buildah\n")
    (tmp_path / "context/link").symlink_to("file")
    container = buildah("from", "scratch")
    buildah("copy", "--chown", "5:6", container, str(tmp_path / "context"), "/app")
    buildah("config", "--cmd", "/app/file", container)
    buildah("commit", "--quiet", container, f"oci:{tmp_path / 'layout'}:x")
    layers = _layers(tmp_path / "layout")
    with (tmp_path / "output").open("w+b") as output, (tmp_path / "scratch").open("w+b") as scratch:
        ended = converter.image(layers, output, scratch)
    assert ended.done is not None, ended.refused
    umoci("unpack", "--image", f"{tmp_path / 'layout'}:x", tmp_path / "reference")
    found = dict(_converted(Erofs(tmp_path / "output")))
    assert found == dict(_unpacked(tmp_path / "reference/rootfs"))
    with tarfile.open(layers[-1].blob) as archive:
        assert "app/file" in [each.name.strip("./") for each in archive]
