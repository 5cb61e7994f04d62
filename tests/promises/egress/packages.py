"""What the package managers of the tests ask for, as plain files: a wheel in an index, an npm package, a git repository."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEEL = "cloche_hello-1.0-py3-none-any.whl"
HOSTILE_SETUP = "everything.py"


def make_index(files: Path, body: str = "def hello():\n    return 'hello from the wheel'\n") -> None:
    """A simple index at /simple/ with one wheel, `cloche-hello`."""
    data = _wheel(body)
    (files / "wheels").mkdir(parents=True)
    (files / "wheels" / WHEEL).write_bytes(data)
    page = files / "simple" / "cloche-hello"
    page.mkdir(parents=True)
    digest = hashlib.sha256(data).hexdigest()
    (page / "index.html").write_text(f'<a href="/wheels/{WHEEL}#sha256={digest}">{WHEEL}</a>\n')


def _wheel(body: str) -> bytes:
    inside = {
        "cloche_hello.py": body,
        "cloche_hello-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: cloche-hello\nVersion: 1.0\n",
        "cloche_hello-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{name},{_record_hash(text)},{len(text)}" for name, text in inside.items()]
    inside["cloche_hello-1.0.dist-info/RECORD"] = "\n".join([*record, "cloche_hello-1.0.dist-info/RECORD,,", ""])
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in inside.items():
            archive.writestr(name, text)
    return packed.getvalue()


def _record_hash(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"


def make_npm(files: Path, registry: str) -> None:
    """A registry with one package, `cloche-hello`."""
    manifest = {"name": "cloche-hello", "version": "1.0.0", "main": "index.js"}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in (
            ("package.json", json.dumps(manifest)),
            ("index.js", "module.exports = 'hello from npm';\n"),
        ):
            about = tarfile.TarInfo(f"package/{name}")
            about.size = len(text)
            archive.addfile(about, io.BytesIO(text.encode()))
    data = packed.getvalue()
    (files / "tarballs").mkdir()
    (files / "tarballs" / "cloche-hello-1.0.0.tgz").write_bytes(data)
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    dist = {"tarball": f"{registry}/tarballs/cloche-hello-1.0.0.tgz", "integrity": integrity}
    document = {
        "name": "cloche-hello",
        "dist-tags": {"latest": "1.0.0"},
        "versions": {"1.0.0": {**manifest, "dist": dist}},
    }
    (files / "cloche-hello").write_text(json.dumps(document))


def make_repository(files: Path, name: str, content: dict[str, str]) -> None:
    """A bare repository that plain files serve (`git update-server-info`)."""
    bare = files / "git" / f"{name}.git"
    bare.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        for path, text in content.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        _git("init", "-q", "-b", "main", cwd=tree)
        _git("add", ".", cwd=tree)
        _git("-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "-q", "-m", "first", cwd=tree)
        _git("clone", "-q", "--bare", str(tree), str(bare), cwd=tree)
    _git("update-server-info", cwd=bare)


def _git(*arguments: str, cwd: Path) -> None:
    empty = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    subprocess.run(["git", *arguments], cwd=cwd, check=True, capture_output=True, env={**os.environ, **empty})
