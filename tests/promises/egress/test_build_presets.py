"""`RUN pip install` and `RUN apt-get install` build through presets: what the operator's own tools use, by the gate."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pip
import pytest

from cloche.wire.images import ImageEvent
from cloche_server.policy.apt_sources import uris_of
from tests.promises.egress.worlds import WEB, World, needs_world, world_node
from tests.promises.nodes import RealNode
from tools.images import samples

MIRRORS = uris_of(Path("/etc/apt"))
pytestmark = [
    needs_world,
    pytest.mark.skipif(not samples.can_make(), reason="needs what `just setup` builds"),
    pytest.mark.skipif(not MIRRORS, reason="this machine's apt has no source that is fetched over HTTP"),
    pytest.mark.timeout(300),
]
BASE = "localhost/python-slim:1"
CONTROL = """Package: cloche-hello
Version: 1.0
Architecture: all
Maintainer: test <test@example.com>
Description: says hello
"""
DOCKERFILE = """FROM {base}
COPY pip /usr/lib/python3/dist-packages/pip
COPY ca.pem /ca.pem
RUN PIP_CERT=/ca.pem python3 -m pip install -q --no-cache-dir --break-system-packages --root-user-action=ignore cloche-hello
RUN rm -rf /etc/apt/sources.list* && echo 'deb [trusted=yes] http://{mirror}/apt ./' > /etc/apt/sources.list \\
 && apt-get update && apt-get install -y --no-install-recommends cloche-hello
"""


def make_apt(files: Path) -> None:
    """A flat repository at /apt with one package, `cloche-hello`."""
    tree, place = files / "deb", files / "apt"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(CONTROL)
    (tree / "opt").mkdir()
    (tree / "opt" / "hello").write_text("hello from the deb\n")
    place.mkdir()
    package = place / "cloche-hello_1.0_all.deb"
    subprocess.run(
        ["dpkg-deb", "--build", "--root-owner-group", str(tree), str(package)], check=True, capture_output=True
    )
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    about = f"Filename: ./{package.name}\nSize: {package.stat().st_size}\nSHA256: {digest}\n"
    (place / "Packages").write_text(CONTROL.rstrip() + "\n" + about)


@pytest.fixture
def node(earth: World) -> Iterator[RealNode]:
    """Its operator's pip uses the mirror at `web.test`; apt's mirror is the world's web too."""
    mirror = urlsplit(MIRRORS[0]).hostname
    assert mirror
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_INDEX_URL", f"https://{WEB}/simple")
        with world_node(earth, hosts={mirror: earth.web}) as made:
            yield made


@pytest.mark.req("NET-3")
@pytest.mark.req("IMG-2")
def test_a_dockerfile_with_pip_and_apt_builds_through_presets(node: RealNode, earth: World, tmp_path: Path) -> None:
    make_apt(earth.files)
    shutil.copytree(Path(pip.__file__).parent, tmp_path / "pip", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "ca.pem").write_bytes(earth.ca)
    mirror = urlsplit(MIRRORS[0]).hostname
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.format(base=BASE, mirror=mirror))
    said: list[ImageEvent] = []
    with node.client(request_timeout_s=200) as client:
        client.images.import_archive(samples.python_slim(), name=BASE)
        presets = ["preset:python-packages", "preset:debian"]
        client.images.build(tmp_path, name="localhost/both:1", egress=presets, on_event=said.append)
    with node.sandbox(image="localhost/both:1") as box:
        result = box.run("cat /opt/hello; python3 -c 'import cloche_hello; print(cloche_hello.hello())'; env")
    assert "hello from the deb\nhello from the wheel" in result.stdout, "".join(event.text or "" for event in said)
    assert "PIP_INDEX_URL" not in result.stdout, "what a preset sets for the steps is not the image's"
