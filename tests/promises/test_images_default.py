"""Without a prebuilt root and without a wish, `cloche run` uses `python:3.12-slim`, from a mirror where one is configured.

The mirror is a registry on loopback; the image of that name is made of Debian packages.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloche_server.images.reference import DEFAULT_REGISTRY
from tests.promises.nodes import RealNode, real_node
from tests.unit.images import registries
from tools.images import make, oci, samples

pytestmark = [
    pytest.mark.skipif(
        not registries.can_run() or shutil.which("skopeo") is None, reason="needs docker-registry, skopeo"
    ),
    pytest.mark.skipif(not samples.can_make(), reason="needs what `just setup` builds"),
    pytest.mark.timeout(240),
]

CALL = ("python3", "-c", "print(6*7)")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealNode]:
    """A new user's: no images, and a mirror for the default registry."""
    folder = Path(tempfile.mkdtemp(prefix="cloche-mirror-"))  # not pytest's, which only root may enter
    folder.chmod(0o755)
    (folder / "images").mkdir()
    with registries.running(tmp_path_factory.mktemp("registry")) as mirror, pytest.MonkeyPatch.context() as environment:
        oci.push(samples.python_slim(), f"{mirror.host}/library/python:3.12-slim")
        settings = folder / "registries.toml"
        settings.write_text(f'[registry."{DEFAULT_REGISTRY}"]\nmirrors = ["{mirror.url}"]\n')
        environment.setenv("CLOCHE_REGISTRIES", str(settings))
        for name in ("CLOCHE_IMAGE", "CLOCHE_ROOTFS"):
            environment.delenv(name, raising=False)
        with real_node(images=folder / "images") as made:
            yield made
    shutil.rmtree(folder)


@pytest.mark.req("IMG-1")
@pytest.mark.req("IMG-3")
@pytest.mark.req("UX-7")
def test_the_first_run_pulls_the_default_image_and_the_second_says_nothing(node: RealNode) -> None:
    assert "CLOCHE_IMAGE" not in os.environ
    first = node.cloche("run", "--", *CALL)
    assert (first.returncode, first.stdout) == (0, b"42\n"), first.stderr
    assert first.stderr.decode().startswith("✓ image python:3.12-slim "), first.stderr
    second = node.cloche("run", "--", *CALL)
    assert (second.returncode, second.stdout, second.stderr) == (0, b"42\n", b"")
    assert len(list((node.paths.store / "roots").glob("*.erofs"))) == 1
    (view,) = json.loads(node.cloche("image", "ls", "--json").stdout)["images"]
    assert view["names"] == ["python:3.12-slim"]
    box = json.loads(node.cloche("create", "--json").stdout)
    assert (box["image"], box["image_digest"]) == ("python:3.12-slim", view["digest"])
    assert node.cloche("kill", box["id"]).returncode == 0


@pytest.mark.long
@pytest.mark.req("IMG-4")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "call", "says"),
    [
        ("minimal", ("sh", "-c", "echo $((6*7)); id -u; pwd"), "42\n0\n/\n"),
        ("node", ("node", "-e", "console.log(6*7, process.getuid(), process.cwd())"), "42 1000 /workspace\n"),
        (
            "python-data",
            (
                "python3",
                "-c",
                "import os, numpy, pandas, matplotlib.pyplot; print(numpy.int64(6)*7, os.getuid(), os.getcwd())",
            ),
            "42 1000 /workspace\n",
        ),
    ],
)
def test_an_image_of_each_recipe_runs(node: RealNode, name: str, call: tuple[str, ...], says: str) -> None:
    """Needs the network for Debian's packages."""
    with tempfile.TemporaryDirectory(prefix="cloche-recipe-") as folder:  # it is large, and pytest keeps its own
        make.make(name, Path(folder) / name)
        imported = node.cloche("image", "import", "-t", f"{name}:1", f"{folder}/{name}")
    assert imported.returncode == 0, imported.stderr
    done = node.cloche("run", f"{name}:1", "--", *call)
    assert (done.returncode, done.stdout.decode()) == (0, says), done.stderr
    view = json.loads(node.cloche("image", "inspect", "--json", f"{name}:1").stdout)
    assert view["config"]["labels"]["org.opencontainers.image.title"] == name
