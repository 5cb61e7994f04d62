"""Images as a user has them: from a registry on loopback to a sandbox, a build, an archive and nothing left.

The image is one static program and nothing else: no shell, no libc, no directory but what it says.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.node.launch.places import NodePaths
from cloche_server.node.launch.up import up
from tests.promises.nodes import CLI, RealNode, real_node, wait_until
from tests.unit.images import pushing, registries

pytestmark = [
    pytest.mark.skipif(not registries.can_run(), reason="needs docker-registry"),
    pytest.mark.timeout(240),
]

SOURCE = Path(__file__).parent / "tool" / "tool.c"
CONFIG = {"Entrypoint": ["/tool", "hello"], "Cmd": ["from", "cmd"], "WorkingDir": "/work", "User": "1234:5"}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[registries.RunningRegistry]:
    folder = tmp_path_factory.mktemp("registry")
    subprocess.run(["gcc", "-O2", "-static", "-Wall", "-Werror", "-o", str(folder / "tool"), str(SOURCE)], check=True)
    program = (folder / "tool").read_bytes()
    with registries.running(folder) as started:
        layers = [_tar(program)]
        pushing.push(started, "tool", "1", layers, CONFIG, env=["PATH=/", "A=b"])
        yield started


def _tar(program: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in (("work", None), ("tool", program)):
            info = tarfile.TarInfo(name)
            info.mode, info.size = 0o755, len(data or b"")
            info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            tar.addfile(info, io.BytesIO(data or b""))
    return out.getvalue()


@pytest.fixture(scope="module")
def node(registry: registries.RunningRegistry) -> Iterator[RealNode]:
    """Whose bare names are the registry's."""
    folder = Path(tempfile.mkdtemp(prefix="cloche-registries-"))  # not pytest's, which only root may enter
    folder.chmod(0o755)
    settings = folder / "registries.toml"
    settings.write_text(f'default_registry = "{registry.host}"\n')
    os.environ["CLOCHE_REGISTRIES"] = str(settings)
    try:
        with real_node() as made:
            yield made
    finally:
        del os.environ["CLOCHE_REGISTRIES"]
        shutil.rmtree(folder)


def said(node: RealNode, *arguments: str, code: int = 0) -> tuple[str, str]:
    done = node.cloche(*arguments)
    assert done.returncode == code, (arguments, done.stdout, done.stderr)
    return done.stdout.decode(), done.stderr.decode()


@pytest.mark.req("IMG-1")
@pytest.mark.req("IMG-4")
def test_an_image_that_is_not_here_is_pulled_once_and_runs_as_it_says(node: RealNode) -> None:
    out, err = said(node, "run", "tool:1")
    assert out == "hello from cmd uid=1234 cwd=/work A=b\n"
    assert err.startswith("✓ image ")
    assert said(node, "run", "tool:1", "--", "x") == ("hello x uid=1234 cwd=/work A=b\n", ""), "later runs say nothing"
    assert said(node, "run", "--entrypoint", "/tool", "tool:1")[0] == "uid=1234 cwd=/work A=b\n"
    assert (
        said(node, "run", "--entrypoint", "", "-u", "root", "-w", "/", "tool:1", "--", "/tool")[0]
        == "uid=0 cwd=/ A=b\n"
    )
    view = json.loads(said(node, "image", "inspect", "--json", "tool:1")[0])
    box = json.loads(said(node, "create", "--json", "--name", "one", "tool:1")[0])
    assert box["image_digest"] == view["digest"]
    events = json.loads(said(node, "logs", "--events", "--json", "one")[0])
    assert view["digest"] in [event["detail"].get("image") for event in events]
    assert said(node, "exec", "one", "--", "/tool", "plain")[0].startswith("plain uid=1234")
    said(node, "image", "rm", "tool:1", code=125)
    said(node, "kill", "one")
    _, err = said(node, "run", "nothing:1", code=125)
    assert err.startswith("✗ image_not_found: ")


@pytest.mark.req("IMG-3")
def test_an_archive_goes_out_and_comes_back_the_same(node: RealNode, tmp_path: Path) -> None:
    (digest,) = said(node, "image", "pull", "tool:1")[0].split()
    said(node, "image", "export", "-o", str(tmp_path / "tool.tar"), "tool:1")
    (tmp_path / "layout").mkdir()
    subprocess.run(["tar", "-xf", str(tmp_path / "tool.tar"), "-C", str(tmp_path / "layout")], check=True)
    for source in ("tool.tar", "layout"):
        assert said(node, "image", "import", "-t", "again:1", str(tmp_path / source))[0].split() == [digest]
    assert said(node, "run", "again:1")[0].startswith("hello from cmd")
    names = [name for view in json.loads(said(node, "image", "ls", "--json")[0])["images"] for name in view["names"]]
    assert any(name.endswith("again:1") for name in names)
    roots = list((node.paths.store / "roots").glob("*.erofs"))
    assert len(roots) == 1, "one content, one root file system"
    for name in ("again:1", "tool:1"):
        said(node, "image", "rm", name)
    said(node, "image", "gc")
    assert list((node.paths.store / "roots").glob("*.erofs")) == []
    assert said(node, "image", "fsck")[1].startswith("✓ the store is whole")


@pytest.mark.req("IMG-2")
@pytest.mark.req("ISO-6")
def test_a_build_runs_in_sandboxes_without_a_network(node: RealNode, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "Dockerfile").write_text(
        'FROM tool:1\nCOPY --chown=77:88 file /work/file\nUSER 0\nRUN ["/tool", "touch", "/work/made"]\n'
        'ENTRYPOINT ["/tool"]\nCMD ["built"]\n'
    )
    first = said(node, "image", "build", "-t", "app:1", str(tmp_path))
    again = said(node, "image", "build", "-t", "app:1", str(tmp_path))
    assert first[0] == again[0]
    assert all("(cached)" in line for line in again[1].splitlines() if line.startswith("["))
    assert said(node, "run", "app:1")[0] == "built uid=0 cwd=/work A=b\n"
    with node.sandbox(image="app:1") as box:
        found = {entry.path: entry for entry in box.files.list("/work")}
        assert (found["/work/file"].uid, found["/work/file"].gid) == (77, 88)
        assert found["/work/made"].uid == 0
    (tmp_path / "Dockerfile").write_text('FROM tool:1\nRUN ["/tool", "connect"]\n')
    _, err = said(node, "image", "build", str(tmp_path), code=1)
    assert "✗ build_failed: " in err
    with node.client() as client:
        assert [box.view.owner for box in client.list() if box.view.owner.startswith("build:")] == []


@pytest.mark.req("IMG-2")
@pytest.mark.req("LIF-6")
def test_a_daemon_that_dies_in_a_build_leaves_nothing_of_it(node: RealNode, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text('FROM tool:1\nUSER 0\nRUN ["/tool", "sleep"]\n')
    building = subprocess.Popen(
        [str(CLI), "image", "build", str(tmp_path)],
        env=node.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: _rooms(node) and _runs(node), what="a step that runs")
        node.restart_daemon()
        wait_until(lambda: not _rooms(node), what="no room of the dead build")
    finally:
        building.kill()
        building.wait()
    assert json.loads(said(node, "image", "fsck", "--json")[0])["problems"] == []
    assert said(node, "run", "tool:1")[0].startswith("hello")


def _rooms(node: RealNode) -> list[str]:
    with node.client() as client:
        return [box.id for box in client.list() if box.view.owner.startswith("build:")]


def _runs(node: RealNode) -> bool:
    with node.client() as client:
        return any(box.view.commands_running for box in client.list() if box.view.owner.startswith("build:"))


@pytest.mark.req("IMG-3")
def test_a_second_node_on_the_same_store_is_refused_by_name(node: RealNode, tmp_path: Path) -> None:
    base = node.base / "second"
    paths = NodePaths(base / "state", base / "run", node.paths.images, node.paths.store, base / "config")
    base.mkdir(mode=0o755)
    with pytest.raises(ClocheError) as refused:
        up(paths, mode=node.mode)
    assert refused.value.code == "store_busy"
    assert "--store" in refused.value.fix
    assert said(node, "run", "tool:1")[0].startswith("hello"), "the first one goes on"
