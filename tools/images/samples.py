"""Images for tests and figures, made of the Debian tree that `just setup` left in the build cache. No network is asked.

`python_slim()` stands in for `python:3.12-slim`; `large(bytes)` is for measuring pulls; `with_file(bytes)` has one file to
read. Each is an OCI layout, made once and kept in the build cache.
"""

import io
import os
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tools.images import oci

VERSION: Final = 1
"""Raise it when something else is made of the same base."""
ENV: Final = ("PATH=/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin:/bin:/sbin", "LANG=C.UTF-8")
FILE: Final = "/srv/file"
LEFT_OUT: Final = ("dev/", "var/lib/apt/lists/", "var/cache/", "var/log/")


def base_tar() -> Path:
    """The newest that `tools/build_rootfs.sh` made."""
    found = sorted(oci.cache_directory().glob("rootfs-base-*.tar"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit("no Debian tree in the build cache: run `just setup` first")
    return found[-1]


def can_make() -> bool:
    return any(oci.cache_directory().glob("rootfs-base-*.tar"))


def python_slim() -> Path:
    """Debian's Python under the names that Docker's image has. As there: root, no entrypoint, `python3` is the command."""

    def make(directory: Path) -> None:
        layout = oci.Layout(directory)
        with layout.layer(level=1) as file, _writing(file) as tar:
            _add_tree(tar)
        with layout.layer() as file, _writing(file) as tar:
            for name in ("python", "python3"):
                _add(tar, f"usr/local/bin/{name}", link="/usr/bin/python3")
        layout.finish({"Env": list(ENV), "Cmd": ["python3"]}, created=0, history=["Debian", "names"])

    return oci.cached("image-python-slim", _key("python-slim"), make)


def large(raw_bytes: int) -> Path:
    """One gzip layer of that size and a small one that takes some of it away, as `apt-get purge` would."""

    def make(directory: Path) -> None:
        layout = oci.Layout(directory)
        with layout.layer() as file, _writing(file) as tar:
            copy = 0
            while file.raw_bytes < raw_bytes:
                _add_tree(tar, f"opt/{copy}/" if copy else "", until=lambda: file.raw_bytes >= raw_bytes)
                copy += 1
        with layout.layer() as file, _writing(file) as tar:
            for name in ("usr/bin/.wh.perl", "etc/alternatives/.wh..wh..opq", "etc/alternatives/only"):
                _add(tar, name, data=b"")
            _add(tar, "etc/motd", data=b"changed by the second layer\n")
        layout.finish({"Env": list(ENV), "Cmd": ["/bin/sh"]}, created=0)

    return oci.cached(f"image-large-{raw_bytes // 1_000_000}", _key("large", raw_bytes), make)


def with_file(size: int) -> Path:
    """`python_slim` and a file of so many bytes that cannot be compressed."""

    def make(directory: Path) -> None:
        layout = oci.Layout(directory)
        with layout.layer(level=1) as file, _writing(file) as tar:
            _add_tree(tar)
        with layout.layer(level=0) as file, _writing(file) as tar:
            _add(tar, FILE[1:], data=random.Random(size).randbytes(size))
        layout.finish({"Env": list(ENV), "Cmd": ["python3"]}, created=0)

    return oci.cached("image-with-file", _key("with-file", size), make)


def _key(*parts: object) -> str:
    base = base_tar()
    return oci.recipe_hash(VERSION, base.name, base.stat().st_size, int(base.stat().st_mtime), *parts)


def _writing(file: Any) -> tarfile.TarFile:
    return tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20)


def _add_tree(tar: tarfile.TarFile, prefix: str = "", until: Any = lambda: False) -> None:
    with tarfile.open(base_tar()) as base:
        for entry in _tidy(base):
            if until():
                return
            content = base.extractfile(entry) if entry.isreg() else None
            entry.name = prefix + entry.name
            if entry.islnk():
                entry.linkname = prefix + os.path.normpath(entry.linkname)
            tar.addfile(entry, content)


def _tidy(base: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for entry in base:
        entry.name = os.path.normpath(entry.name)
        entry.pax_headers = {}
        if entry.name != "." and not entry.name.startswith(LEFT_OUT):
            yield entry


def _add(tar: tarfile.TarFile, name: str, *, data: bytes = b"", link: str = "") -> None:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.size, entry.mtime = 0o755, len(data), 1_700_000_000
    if link:
        entry.type, entry.linkname = tarfile.SYMTYPE, link
    tar.addfile(entry, io.BytesIO(data))
