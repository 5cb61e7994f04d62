"""`cloche image build --compat`: buildah in a sandbox makes the files that the node's own builder makes."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.promises.nodes import RealNode, real_node
from tools.images import make, oci

pytestmark = [
    pytest.mark.long,
    pytest.mark.req("IMG-2"),
    pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="needs mmdebstrap"),
    pytest.mark.timeout(1200),
]

BUILDAH = "localhost/cloche-buildah"
BASE = "localhost/minimal:1"
DOCKERFILE = f"""FROM {BASE} AS first
RUN mkdir -p /out/sub && echo made > /out/sub/made && ln -s sub/made /out/link && chmod 4750 /out/sub/made
RUN rm /bin/wget && chown 1000:1000 /out

FROM {BASE}
ENV GREETING=hello
WORKDIR /app
COPY --from=first /out /app/out
COPY --chown=1000:1001 files/ /app/
RUN echo "$GREETING" > greeting && rm /bin/vi && id -u > me
USER 1000
CMD ["/bin/cat", "greeting"]
"""
MOUNTS = f"""FROM {BASE}
RUN --mount=type=cache,target=/cache echo kept > /cache/x && cp /cache/x /copied
"""
PRUNED = (
    "proc",
    "sys",
    "dev",
    "tmp",
    "run",
    ".cloche",
    "etc/hosts",
    "etc/hostname",
    "etc/machine-id",
    "etc/resolv.conf",
)
WALK = f"""
find / \\( {" -o ".join(f"-path /{each}" for each in PRUNED)} \\) -prune -o -print | sort | while read -r path; do
    stat -c '%n %F %a %u:%g %N' "$path"
    [ -f "$path" ] && [ ! -L "$path" ] && sha256sum "$path"
done
true
"""


def recipe(name: str) -> Path:
    """The image of that recipe, from Debian's packages; kept in the build cache."""
    files = sorted((make.RECIPES / name).iterdir())
    key = oci.recipe_hash(make.FINISH, Path(make.__file__), Path(oci.__file__), *files)

    def made(directory: Path) -> None:
        make.make(name, directory)

    return oci.cached(f"image-recipe-{name}", key, made)


@pytest.fixture(scope="module")
def node() -> Iterator[RealNode]:
    folder = Path(tempfile.mkdtemp(prefix="cloche-compat-"))  # not pytest's, which only root may enter
    folder.chmod(0o755)
    with real_node(images=folder) as started:
        assert started.cloche("image", "import", "-t", BASE, str(recipe("minimal"))).returncode == 0
        yield started
    shutil.rmtree(folder)


def context(directory: Path, dockerfile: str) -> str:
    (directory / "files/deep").mkdir(parents=True)
    (directory / "files/one").write_text("1")
    (directory / "files/deep/run.sh").write_text("#!/bin/sh\n")
    (directory / "files/ignored").write_text("not for the image")
    (directory / ".dockerignore").write_text("**/ignored\n")
    (directory / "Dockerfile").write_text(dockerfile)
    for path in directory.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.suffix == ".sh" else 0o644)
    return str(directory)


def files(node: RealNode, image: str) -> list[str]:
    with node.sandbox(image=image, user="0:0", privileges="package-install") as box:
        done = box.run(["/bin/sh", "-c", WALK], timeout_s=120)
        assert done.exit_code == 0, done.stderr
        return done.stdout.splitlines()


def test_it_makes_what_the_native_builder_makes(node: RealNode, tmp_path: Path) -> None:
    place = context(tmp_path / "context", DOCKERFILE)
    absent = node.cloche("image", "build", "--compat", place)
    assert absent.returncode == 125
    assert b"image_not_found" in absent.stderr
    assert b"tools.images.make buildah" in absent.stderr

    imported = node.cloche("image", "import", "-t", BUILDAH, str(recipe("buildah")))
    assert imported.returncode == 0, imported.stderr
    started = time.monotonic()
    compat = node.cloche("image", "build", "--compat", "-t", "localhost/theirs:1", place, timeout_s=600)
    compat_s = time.monotonic() - started
    assert compat.returncode == 0, compat.stderr.decode()
    native = node.cloche("image", "build", "-t", "localhost/ours:1", place, timeout_s=300)
    assert native.returncode == 0, native.stderr.decode()
    print(f"with buildah {compat_s:.1f} s")

    theirs, ours = files(node, "localhost/theirs:1"), files(node, "localhost/ours:1")
    assert len(ours) > 100, "busybox has more names than that"
    assert sorted(set(theirs) ^ set(ours)) == []
    done = node.cloche("run", "localhost/theirs:1")
    assert (done.returncode, done.stdout) == (0, b"hello\n"), done.stderr
    configs = [
        json.loads(node.cloche("image", "inspect", "--json", name).stdout)["config"]
        for name in ("localhost/theirs:1", "localhost/ours:1")
    ]
    for field in ("cmd", "env", "user", "workdir"):
        assert configs[0][field] == configs[1][field], field
    assert json.loads(node.cloche("ps", "--json").stdout)["sandboxes"] == []


def test_it_knows_what_the_native_builder_refuses(node: RealNode, tmp_path: Path) -> None:
    assert node.cloche("image", "import", "-t", BUILDAH, str(recipe("buildah"))).returncode == 0
    place = context(tmp_path / "context", MOUNTS)
    native = node.cloche("image", "build", place)
    assert b"dockerfile_unsupported" in native.stderr
    compat = node.cloche("image", "build", "--compat", "-t", "localhost/mounts:1", place, timeout_s=600)
    assert compat.returncode == 0, compat.stderr.decode()
    assert node.cloche("run", "localhost/mounts:1", "--", "/bin/cat", "/copied").stdout == b"kept\n"

    (tmp_path / "context/Dockerfile").write_text(f"FROM {BASE}\nRUN echo on the way; exit 3\n")
    failed = node.cloche("image", "build", "--compat", place, timeout_s=600)
    assert (failed.returncode, b"build_failed" in failed.stderr) == (1, True)
    assert b"on the way" in failed.stderr
