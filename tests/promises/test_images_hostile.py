"""The table of hostile archives as images in a registry, pulled by a node: refused by name or harmless, and nothing else.

`tests/unit/images/test_converter_hostile.py` shows what the converter makes of each, and that each defence is needed. Here the
whole way is shown: from the registry's bytes to the node's answer, its memory, its disk, and its next customers.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cloche.errors import ClocheError
from tests.promises.nodes import RealNode
from tests.promises.pictures import MIRROR_PREFIX, assert_whole, layer, mirror, picture_node, program, roots, run_output
from tests.promises.plants import guest_processes
from tests.unit.images import converter, hostile, registries
from tests.unit.images.erofs import Erofs, Inode, told
from tests.unit.images.hostile import MIB, Row
from tests.unit.images.pushing import OCI, Pusher, push, sha256
from tests.unit.images.registries import RunningRegistry

pytestmark = [
    pytest.mark.req("IMG-1"),
    pytest.mark.req("ISO-3"),
    pytest.mark.req("ISO-6"),
    pytest.mark.skipif(not registries.can_run(), reason="needs docker-registry"),
    pytest.mark.skipif(os.getuid() != 0, reason="whose processes they are is told by their ids"),
    pytest.mark.timeout(1800),
]

CI_COUNT = 12
REFUSALS = ("image_refused", "image_too_large", "image_corrupt")
CODES = {"bad_digest": "image_corrupt", "bad_length": "image_corrupt"}
"""Of the converter's words; the others are image_refused."""
LIMITED = ("too_large", "too_many_entries", "ratio")
"""The table's limits are smaller than the node's, which may find something else wrong first."""
GIVEN = frozenset(
    b".cloche .cloche/agent dev etc etc/hosts etc/machine-id proc run run/cloche sys tmp tmp/.keep workspace".split()
)
"""What every root gets."""
DAEMON_MORE_BYTES_MAX = 64 * MIB
CONVERTER_BYTES_MAX = 320 * MIB
DISK_BYTES_MAX = 1024 * MIB


@dataclass
class Peaks:
    """The most that the daemon and its converters had at once."""

    daemon_bytes: int = 0
    converter_bytes: int = 0
    disk_bytes: int = 0
    """Of files without a name, which only the daemon and the converter hold."""
    over: threading.Event = field(default_factory=threading.Event)

    def watch(self, node: RealNode) -> None:
        while not self.over.wait(0.03):
            self.daemon_bytes = max(self.daemon_bytes, _rss(node.pid))
            self.converter_bytes = max(self.converter_bytes, sum(map(_rss, guest_processes(node))))
            self.disk_bytes = max(self.disk_bytes, _unnamed(node.pid))


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _unnamed(pid: int) -> int:
    found = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            held = os.stat(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:
            continue
        if stat.S_ISREG(held.st_mode) and held.st_nlink == 0:
            found += held.st_blocks * 512
    return found


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    with registries.running(tmp_path_factory.mktemp("registry")) as started:
        yield started


@pytest.fixture(scope="module")
def node(registry: RunningRegistry) -> Iterator[RealNode]:
    push(registry, MIRROR_PREFIX + "good", "1", [layer({"tool": program("tool")})], {"Entrypoint": ["/tool"]})
    with picture_node(mirror(registry.url)) as made:
        assert run_output(made, "good:1", "before").startswith("before ")
        yield made


@pytest.fixture
def around() -> Iterator[Path]:
    """A directory that anybody may write to: where the archives try to get out to."""
    place = Path(tempfile.mkdtemp(prefix="cloche-hostile-"))
    place.chmod(0o777)
    try:
        yield place
    finally:
        shutil.rmtree(place)


def rows(seed: int, long_run: bool) -> list[Row]:
    return hostile.TABLE if long_run else random.Random(seed).sample(hostile.TABLE, CI_COUNT)


def put(registry: RunningRegistry, repository: str, layers: list[converter.Layer]) -> None:
    """As a registry would have it that was made to lie: the blobs are put on its disk under the names that are said of them."""
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [each.diff_id for each in layers]},
        }
    ).encode()
    for each in layers:
        place = registry.blob_file(each.digest)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(each.blob.read_bytes())
        name = each.digest.removeprefix("sha256:")
        link = registry.directory / f"data/docker/registry/v2/repositories/{repository}/_layers/sha256/{name}/link"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.write_text(each.digest)
    kinds = {"gzip": "tar+gzip", "zstd": "tar+zstd", "none": "tar"}
    with Pusher(registry, repository) as pusher:
        pusher.blob(config)
        pusher.manifest(
            {
                "schemaVersion": 2,
                "mediaType": f"{OCI}manifest.v1+json",
                "config": {"mediaType": f"{OCI}config.v1+json", "digest": sha256(config), "size": len(config)},
                "layers": [
                    {
                        "mediaType": f"{OCI}layer.v1.{kinds[each.compression]}",
                        "digest": each.digest,
                        "size": each.size,
                    }
                    for each in layers
                ],
            },
            "1",
        )


def listing(*places: Path) -> dict[str, tuple[int, int]]:
    """Every file outside the store."""
    found = {}
    for place in places:
        for path in place.rglob("*"):
            if not path.is_dir():
                held = path.lstat()
                found[str(path)] = (held.st_size, held.st_nlink)
    return found


def outside(node: RealNode, around: Path) -> dict[str, tuple[int, int]]:
    ours = ("images", "logs", "journal", "sandboxes")
    kept = [path for path in node.paths.state.iterdir() if path.name not in ours]
    top = {str(path): (0, 0) for place in (Path("/"), node.base, node.paths.state) for path in place.iterdir()}
    return top | listing(around, node.paths.run, *(path for path in kept if path.is_dir()))


def _told(image: Erofs, inode: Inode) -> str:
    special = inode.mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX)
    return told(image, inode) + (f"@{stat.S_IMODE(inode.mode):o}" if special else "")


def check(row: Row, node: RealNode, registry: RunningRegistry, around: Path, number: int) -> None:
    place = around / str(number)
    place.mkdir(mode=0o777)
    (place / "canary").write_bytes(b"canary")
    layers = row.make(place)
    name = f"hostile-{number}"
    put(registry, MIRROR_PREFIX + name, layers)
    before, roots_before = outside(node, around), set(roots(node))
    refused: ClocheError | None = None
    with node.client(request_timeout_s=600) as client:
        try:
            view = client.images.pull(f"{registry.host}/{MIRROR_PREFIX}{name}:1")
        except ClocheError as failed:
            refused = failed
    assert outside(node, around) == before, f"{row.name}: something was written to the host"
    by_limit = bool(row.limits) or row.expect in LIMITED
    if refused is not None:
        assert row.limits or isinstance(row.expect, str), f"{row.name}: {refused}"
        assert refused.code in REFUSALS, f"{row.name}: {refused}"
        if not by_limit:
            assert refused.code == CODES.get(str(row.expect), "image_refused"), f"{row.name}: {refused}"
            if refused.code == "image_refused":
                assert refused.detail["reason"] == row.expect, f"{row.name}: {refused.detail}"
        assert set(roots(node)) == roots_before
        return
    assert by_limit or not isinstance(row.expect, str), f"{row.name}: it was accepted"
    (file,) = set(roots(node)) - roots_before
    assert file.stat().st_size == view.root_bytes
    if isinstance(row.expect, str):
        return  # a smaller limit than the node's is what refuses it
    image = Erofs(file)
    expected = row.expect(place) if callable(row.expect) else row.expect
    found = {path: _told(image, inode) for path, inode in image.tree().items() if path not in GIVEN | {b""}}
    assert found == {path: each for path, each in expected.items() if path not in GIVEN}, row.name
    with node.client() as client:
        client.images.remove(view.digest)


def test_hostile_images_are_refused_by_name_or_harmless(
    node: RealNode,
    registry: RunningRegistry,
    around: Path,
    seed: int,
    long_run: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    daemon_before = node.daemon_rss_bytes()
    peaks = Peaks()
    watching = threading.Thread(target=peaks.watch, args=(node,))
    watching.start()
    try:
        for number, row in enumerate(rows(seed, long_run)):
            print(row.name)
            check(row, node, registry, around, number)
    finally:
        peaks.over.set()
        watching.join()
    with capsys.disabled():
        grown, converters, disk = peaks.daemon_bytes - daemon_before, peaks.converter_bytes, peaks.disk_bytes
        print(f" [daemon +{grown // MIB} MiB, converters {converters // MIB} MiB, disk {disk // MIB} MiB]", end="")
    assert grown <= DAEMON_MORE_BYTES_MAX
    assert converters <= CONVERTER_BYTES_MAX
    assert disk <= DISK_BYTES_MAX
    assert not guest_processes(node)
    assert_whole(node)
    assert list((node.paths.store / "tmp/partial").iterdir()) == []
    assert run_output(node, "good:1", "still", "serves").startswith("still serves ")


def test_a_harmless_one_runs_and_is_still_harmless(node: RealNode, registry: RunningRegistry, around: Path) -> None:
    """Links out of the tree lead nowhere but into the sandbox."""
    wanted = ("write through an absolute symlink", "write through a symlink", "set-uid", "device node")
    for number, row in enumerate(row for row in hostile.TABLE if row.name in wanted):
        place = around / str(number)
        place.mkdir(mode=0o777)
        put(registry, f"{MIRROR_PREFIX}runs-{number}", row.make(place))
        before = outside(node, around)
        with node.sandbox(image=f"runs-{number}:1", memory_mb=64, user="0") as box:
            names = {entry.path for entry in box.files.list("/")}
            assert "/.cloche" in names
            if "/out" in names:
                box.files.write("/out/written", b"inside")
        assert {**before} == {path: each for path, each in outside(node, around).items() if path in before}
        assert not (place / "written").exists()
        assert not Path("/written").exists()
