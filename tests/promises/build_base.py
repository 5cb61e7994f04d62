"""A small image with a C compiler, made of the Debian packages of this machine, and buildah beside it as the reference.

Nothing is downloaded: the files of the installed packages become one layer. As root on Debian with gcc and buildah.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

NAME = "localhost/cc:1"
PACKAGES = ("gcc", "libc6-dev", "dash", "coreutils", "findutils")
LEFT_OUT = re.compile(r"/usr/share/(doc|man|locale|info|lintian|bug)(/|\Z)|san[0-9_]*\.(so|a)|/x32|/lib32")
EXTRA = ("etc", "etc/passwd", "etc/group", "root", "tmp", "var")
TOP_LINKS = ("bin", "sbin", "lib", "lib64")
PASSWD = "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1001:app:/app:/bin/sh\n"
GROUP = "root:x:0:\napp:x:1001:\n"


def can_run() -> bool:
    tools = all(shutil.which(each) for each in ("buildah", "dpkg-query", "gcc", "tar"))
    return tools and os.getuid() == 0


def _packages(wanted: Sequence[str]) -> set[str]:
    """With all that they depend on and that is installed."""
    form = "${Package}\t${Depends}, ${Pre-Depends}\t${Provides}\n"
    told = subprocess.run(["dpkg-query", "-W", "-f", form], capture_output=True, text=True, check=True).stdout
    needs: dict[str, str] = {}
    provided: dict[str, str] = {}
    for line in told.splitlines():
        name, depends, provides = line.split("\t")
        needs[name] = depends
        for each in provides.split(","):
            provided.setdefault(re.sub(r"[ :(].*", "", each.strip()), name)
    found: set[str] = set()
    todo = list(wanted)
    while todo:
        name = todo.pop()
        name = name if name in needs else provided.get(name, "")
        if name in found or name not in needs:
            continue
        found.add(name)
        for group in needs[name].split(","):
            names = [re.sub(r"[ :(].*", "", each.strip()) for each in group.split("|")]
            todo += [each for each in names if each in needs or each in provided][:1]
    return found


def _files() -> list[str]:
    """Relative to `/`, under their real parents."""
    listed = subprocess.run(["dpkg", "-L", *sorted(_packages(PACKAGES))], capture_output=True, text=True, check=True)
    found = set(TOP_LINKS)
    for line in listed.stdout.splitlines():
        if line.startswith("/") and line != "/." and not LEFT_OUT.search(line) and os.path.lexists(line):
            parent, name = os.path.split(line)
            found.add(os.path.join(os.path.realpath(parent), name).lstrip("/"))
    return sorted(found - {"", *EXTRA})


def layout(directory: Path) -> Path:
    """An OCI layout with the one image."""
    blobs = directory / "blobs/sha256"
    blobs.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        extra = Path(scratch)
        extra.chmod(0o755)
        for name in ("etc", "root", "tmp", "var"):
            (extra / name).mkdir()
        (extra / "tmp").chmod(0o1777)
        (extra / "etc/passwd").write_text(PASSWD)
        (extra / "etc/group").write_text(GROUP)
        layer = extra / "layer.tar"
        subprocess.run(
            ["tar", "--numeric-owner", "--no-recursion", "-C", "/", "-cf", str(layer), "-T", "-"],
            input="\n".join(_files()).encode(),
            check=True,
        )
        subprocess.run(["tar", "--no-recursion", "-C", str(extra), "-rf", str(layer), *EXTRA], check=True)
        with layer.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        size = layer.stat().st_size
        shutil.move(layer, blobs / digest)

    def put(document: object) -> dict[str, object]:
        data = json.dumps(document).encode()
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        return {"digest": f"sha256:{name}", "size": len(data)}

    image = "application/vnd.oci.image"
    config = put(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/usr/bin:/bin"], "Cmd": ["/bin/sh"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{"created_by": "the packages of this machine"}],
        }
    )
    manifest = put(
        {
            "schemaVersion": 2,
            "mediaType": f"{image}.manifest.v1+json",
            "config": {"mediaType": f"{image}.config.v1+json", **config},
            "layers": [{"mediaType": f"{image}.layer.v1.tar", "digest": f"sha256:{digest}", "size": size}],
        }
    )
    named = {"org.opencontainers.image.ref.name": "1"}
    index = {
        "schemaVersion": 2,
        "manifests": [{"mediaType": f"{image}.manifest.v1+json", **manifest, "annotations": named}],
    }
    (directory / "index.json").write_text(json.dumps(index))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return directory


class Buildah:
    """The reference, with a store of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, *arguments: str, timeout_s: float = 300) -> str:
        place = ["--root", str(self._directory / "root"), "--runroot", str(self._directory / "run")]
        done = subprocess.run(
            ["buildah", *place, "--storage-driver", "vfs", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout.strip()

    def add_base(self, base: Path) -> None:
        self("tag", self("pull", f"oci:{base}:1"), NAME)

    def build(self, context: Path, dockerfile: Path, output: Path, **args: str) -> Path:
        """To an OCI archive."""
        pairs = [word for name, value in args.items() for word in ("--build-arg", f"{name}={value}")]
        self(
            "bud",
            "--isolation",
            "chroot",
            "--layers=false",
            "-f",
            str(dockerfile),
            "-t",
            "result",
            *pairs,
            str(context),
        )
        self("push", "result", f"oci-archive:{output}:result")
        return output
