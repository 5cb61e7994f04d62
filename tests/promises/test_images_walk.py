"""An image made by other people's tools, seen from inside a sandbox, is what the reference unpacker makes of it.

umoci and buildah make it, skopeo pushes it, Cloche pulls it; then one program walks both trees: inside the sandbox, and on the
host where `umoci unpack` put it. Every name, type, mode, owner, time, content, link and device number must be equal.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.promises.build_base import Buildah
from tests.promises.nodes import RealNode
from tests.promises.pictures import MIRROR_PREFIX, assert_whole, mirror, picture_node, program
from tests.unit.images import registries
from tests.unit.images.registries import RunningRegistry

TOOLS = ("umoci", "skopeo", "buildah")
pytestmark = [
    pytest.mark.req("IMG-1"),
    pytest.mark.req("IMG-3"),
    pytest.mark.skipif(not registries.can_run(), reason="needs docker-registry"),
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {', '.join(TOOLS)}"),
    pytest.mark.skipif(os.getuid() != 0, reason="the reference unpacker makes devices and owners"),
    pytest.mark.timeout(240),
]

OURS = frozenset({".cloche", "workspace", "proc", "sys", "dev", "tmp", "run"})
"""What a sandbox has of its own at its root, instead of the image's; below these nothing is compared."""
OUR_FILES = frozenset({"etc/hosts", "etc/hostname", "etc/machine-id", "etc/resolv.conf"})
"""Bound over, or made where the image has none."""
WRITTEN = (".", "etc")
"""Where the sandbox puts those: their own times are new."""
CHARACTER, BLOCK = "20000", "60000"
"""gVisor reads no device number from EROFS: its overlay takes every character device for a whiteout, a block device is 0:0."""
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")
LONG = "n" * 255
DEEP = "/".join(["deep-" + "d" * 60] * 12)
SECOND = 1_000_000_000


@dataclass(frozen=True)
class Seen:
    """One line of `walk`, without the inode's number."""

    kind: str
    mode: str
    uid: str
    gid: str
    links: str
    size: str
    time: str
    content: str


def seen(text: str) -> tuple[dict[str, Seen], set[frozenset[str]]]:
    """Every path, and the groups of names that are one file."""
    found: dict[str, Seen] = {}
    groups: dict[str, set[str]] = defaultdict(set)
    for line in text.splitlines():
        path, *fields, inode = line.split("\t")
        assert path not in found, path
        found[path] = Seen(*fields)
        if fields[0] == "100000" and int(fields[4]) > 1:
            groups[inode].add(path)
    return found, {frozenset(names) for names in groups.values()}


# ------------------------------------------------------------------------------------------ making it


def umoci(*arguments: str) -> None:
    subprocess.run(["umoci", *arguments], check=True, capture_output=True)


def fill(root: Path) -> None:
    """The first layer: one of each kind."""
    (root / "walk").write_bytes(program("walk"))
    (root / "walk").chmod(0o755)
    for name in ("etc", "opaque/below/more", "opaque-later/below", "kept", "gone/deep", "swap-dir", "tmp", "links"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text("root:x:0:0:root:/:/none\n")
    for name in ("opaque/a", "opaque/below/b", "opaque/below/more/c", "opaque-later/a", "opaque-later/below/b"):
        (root / name).write_text(name)
    for name in ("kept/removed", "kept/stays", "gone/a", "gone/deep/b", "swap-dir/inside", "swap-file", "touched"):
        (root / name).write_text(name)
    (root / "kept/hidden-by-insert").write_text("x")
    (root / "swap-link").symlink_to("kept")
    names(root)
    kinds(root)
    links(root)


def names(root: Path) -> None:
    (root / "names").mkdir()
    (root / "names" / LONG).write_text("a name of 255 bytes")
    (root / DEEP).mkdir(parents=True)
    (root / DEEP / "file").write_text("a path of some 800 bytes")
    for name in (
        b"a space",
        b"caf\xc3\xa9",
        b"not UTF-8 \xff\xfe",
        b"new\nline",
        b"back\\slash",
        b"*?[",
        b"-rf",
        b"..x",
    ):
        Path(os.fsdecode(os.fsencode(root / "names") + b"/" + name)).write_bytes(name)


def kinds(root: Path) -> None:
    place = root / "kinds"
    place.mkdir()
    for name, size in (("empty", 0), ("one", 1), ("page", 4096), ("page-and-one", 4097), ("big", 3_000_001)):
        (place / name).write_bytes(random.Random(size).randbytes(size))
    os.mknod(place / "null", 0o666 | 0o020000, os.makedev(1, 3))
    os.mknod(place / "far", 0o600 | 0o020000, os.makedev(511, 1_000_000 % 256))
    os.mknod(place / "disk", 0o640 | 0o060000, os.makedev(7, 200))
    os.mkfifo(place / "fifo", 0o622)
    for mode in (0o4755, 0o2755, 0o6711, 0o1644, 0o000, 0o777, 0o4000):
        (place / f"mode-{mode:o}").write_text("x")
        os.chown(place / f"mode-{mode:o}", mode, 7)
        (place / f"mode-{mode:o}").chmod(mode)
    (place / "folder").mkdir()
    (place / "folder").chmod(0o3770)
    for number, (uid, gid) in enumerate(((1, 2), (65534, 65534), (70_000, 80_000), (2**31 - 2, 2**31 - 3))):
        (place / f"owner-{number}").write_text("x")
        os.chown(place / f"owner-{number}", uid, gid)
    for number, at in enumerate((0, 1, 981_173_106, 2**31 + 5, 2**32 + 5, 2**33)):
        (place / f"time-{number}").write_text("x")
        os.utime(place / f"time-{number}", ns=(at * SECOND, at * SECOND))
    (place / "attributes").write_text("x")
    os.setxattr(place / "attributes", "user.colour", b"blue")
    os.setxattr(place / "attributes", "security.capability", CAPABILITY)
    os.setxattr(place / "folder", "user.folder", b"\x00\xff")
    os.utime(place, ns=(123_456_789 * SECOND, 123_456_789 * SECOND))


def links(root: Path) -> None:
    place = root / "links"
    for name, target in (
        ("absolute", "/etc/passwd"),
        ("up", "../../../.."),
        ("nowhere", "no/such"),
        ("long", "t" * 1000),
    ):
        (place / name).symlink_to(target)
    os.lchown(place / "up", 11, 12)
    (place / "self").symlink_to("self")
    (place / "one").write_text("three names")
    os.link(place / "one", place / "two")
    os.link(place / "one", root / "kept/three")
    (place / "first").write_text("will be replaced under this name only")
    os.link(place / "first", place / "second")
    os.link(place / "absolute", place / "absolute-too", follow_symlinks=False)
    (place / "suid").write_text("x")
    os.link(place / "suid", place / "suid-too")
    (place / "suid").chmod(0o4711)


def change(root: Path) -> None:
    """The second layer: what was removed, replaced, touched."""
    (root / "kept/removed").unlink()
    shutil.rmtree(root / "gone")
    shutil.rmtree(root / "swap-dir")
    (root / "swap-dir").write_text("now a file")
    (root / "swap-file").unlink()
    (root / "swap-file").mkdir()
    (root / "swap-file/inside").write_text("now a directory")
    (root / "swap-link").unlink()
    (root / "swap-link").mkdir()
    (root / "links/first").unlink()
    (root / "links/first").write_text("the new one")
    (root / "links/two").unlink()
    os.link(root / "links/second", root / "links/new-name")
    (root / "touched").chmod(0o600)
    os.chown(root / "touched", 99, 98)
    os.utime(root / "touched", ns=(1_111_111_111 * SECOND, 1_111_111_111 * SECOND))


def raw_layer(file: Path) -> None:
    """What neither tool writes by itself: nanoseconds, a hard link to a lower layer, marks behind the content."""
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as tar:

        def add(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **fields: object) -> None:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.mtime = kind, len(data), 1_600_000_000
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))

        for number, at in enumerate(("1500000000.123456789", "0.000000001", "4294967296.5")):
            add(f"nanos-{number}", data=b"x", pax_headers={"mtime": at})
        add("nanos-folder", tarfile.DIRTYPE, mode=0o755, pax_headers={"mtime": "1400000000.999999999"})
        add("late-link", tarfile.LNKTYPE, linkname="kept/stays")
        add("opaque-later", tarfile.DIRTYPE, mode=0o711)
        add("opaque-later/new", data=b"stays")
        add("opaque-later/.wh..wh..opq")
        add("twice", data=b"first")
        add("twice", data=b"second", mode=0o640)


def by_umoci(directory: Path) -> tuple[Path, str]:
    layout, bundle, extra = directory / "layout", directory / "bundle", directory / "extra"
    umoci("init", "--layout", str(layout))
    image = f"{layout}:made"
    umoci("new", "--image", image)
    umoci("unpack", "--image", image, str(bundle))
    fill(bundle / "rootfs")
    umoci("repack", "--refresh-bundle", "--image", image, str(bundle))
    change(bundle / "rootfs")
    umoci("repack", "--refresh-bundle", "--image", image, str(bundle))
    extra.mkdir()
    (extra / "inserted").write_text("inserted")
    umoci("insert", "--opaque", "--image", image, str(extra), "/opaque")
    umoci("insert", "--whiteout", "--image", image, "/kept/hidden-by-insert")
    raw_layer(directory / "raw.tar")
    umoci("raw", "add-layer", "--image", image, str(directory / "raw.tar"))
    umoci("config", "--image", image, "--config.user", "0", "--config.cmd", "/walk")
    return layout, "made"


def by_buildah(directory: Path) -> tuple[Path, str]:
    buildah = Buildah(directory / "storage")
    layout = directory / "layout"
    for base, act, target in (("scratch", fill, "first"), ("first", change, f"oci:{layout}:made")):
        container = buildah("from", base)
        act(Path(buildah("mount", container)))
        buildah("umount", container)
        buildah("config", "--user", "0", "--cmd", "/walk", container)
        buildah("commit", "--format", "oci", container, target)
    return layout, "made"


# ------------------------------------------------------------------------------------------- comparing


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    with registries.running(tmp_path_factory.mktemp("registry")) as started:
        yield started


@pytest.fixture(scope="module")
def node(registry: RunningRegistry) -> Iterator[RealNode]:
    with picture_node(mirror(registry.url)) as made:
        yield made


def reference(layout: Path, tag: str, directory: Path) -> str:
    umoci("unpack", "--image", f"{layout}:{tag}", str(directory / "reference"))
    walker = directory / "walk"
    walker.write_bytes(program("walk"))
    walker.chmod(0o755)
    argv = [str(walker), str(directory / "reference/rootfs"), *sorted(OURS)]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("make", [by_umoci, by_buildah])
def test_a_sandbox_sees_what_the_reference_unpacks(
    make: Callable[[Path], tuple[Path, str]], node: RealNode, registry: RunningRegistry, tmp_path: Path
) -> None:
    layout, tag = make(tmp_path)
    name = make.__name__.replace("_", "-")
    target = f"docker://{registry.host}/{MIRROR_PREFIX}{name}:1"
    argv = ["skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"oci:{layout}:{tag}", target]
    subprocess.run(argv, check=True, capture_output=True)
    with node.client() as client:
        view = client.images.pull(f"{name}:1")
    with node.sandbox(image=f"{name}:1", user="0", privileges="package-install") as box:
        inside = box.commands.run(["/walk", "/", *sorted(OURS)]).check().stdout
    (here, here_links), (there, there_links) = seen(inside), seen(reference(layout, tag, tmp_path))
    hidden = {path for path, each in there.items() if each.kind == CHARACTER}
    blocks = {path for path, each in there.items() if each.kind == BLOCK}
    apart = OURS | OUR_FILES
    assert set(here) - apart == set(there) - apart - hidden
    there |= {path: replace(there[path], content="0:0") for path in blocks}
    there |= {path: replace(there[path], time=here[path].time) for path in WRITTEN}
    wrong = {path: (each, there[path]) for path, each in here.items() if path not in apart and each != there[path]}
    assert wrong == {}
    assert here_links == there_links
    assert len(there) > 80
    assert frozenset({"links/suid", "links/suid-too"}) in here_links
    assert here["links/first"].content != here["links/second"].content, "one name of two was replaced"
    assert view.lost.devices == len(hidden | blocks) == 3
    assert view.lost.xattrs == 3
    told = " ".join(view.lost.xattr_examples)
    assert "security.capability" in told
    assert "kinds/attributes" in told
    assert_whole(node)


def test_the_comparison_notices(tmp_path: Path) -> None:
    """Else an equal result says nothing."""
    walker = tmp_path / "walk"
    walker.write_bytes(program("walk"))
    walker.chmod(0o755)
    tree = tmp_path / "tree"
    tree.mkdir()
    fill(tree)

    def walked() -> tuple[dict[str, Seen], set[frozenset[str]]]:
        return seen(subprocess.run([str(walker), str(tree)], check=True, capture_output=True, text=True).stdout)

    def relink() -> None:
        shutil.copy2(tree / "links/one", tree / "copy")
        (tree / "links/two").unlink()
        (tree / "copy").rename(tree / "links/two")

    changes: list[Callable[[], object]] = [
        lambda: os.utime(tree / "touched", ns=(1, 1)),
        lambda: (tree / "kinds/big").write_bytes(random.Random(1).randbytes(3_000_001)),
        lambda: (tree / "kinds/mode-4755").chmod(0o755),
        lambda: os.chown(tree / "kinds/owner-1", 1, -1),
        lambda: os.lchown(tree / "links/up", 11, 13),
        relink,
    ]
    before = walked()
    for act in changes:
        act()
        after = walked()
        assert after != before
        before = after
