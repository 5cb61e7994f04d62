"""Writes OCI image layouts, layer by layer, and keeps finished ones in the build cache. Nothing is held in memory."""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
TAG: Final = "image"
"""The one name in each layout."""
_MEDIA: Final = "application/vnd.oci.image"
_GZIP: Final = 16 + zlib.MAX_WBITS


@dataclass(frozen=True)
class Layer:
    """One blob of a layout."""

    digest: str
    diff_id: str
    size: int
    media_type: str


class _LayerFile:
    """Takes a tar's bytes; compresses and hashes them on the way."""

    def __init__(self, sink: BinaryIO, level: int) -> None:
        self._sink = sink
        self._packer = zlib.compressobj(level, wbits=_GZIP) if level else None
        self.raw = hashlib.sha256()
        self.packed = hashlib.sha256()
        self.raw_bytes = 0

    def write(self, data: bytes) -> int:
        self.raw.update(data)
        self.raw_bytes += len(data)
        self._put(self._packer.compress(data) if self._packer else data)
        return len(data)

    def end(self) -> None:
        self._put(self._packer.flush() if self._packer else b"")

    def _put(self, data: bytes) -> None:
        self.packed.update(data)
        self._sink.write(data)


class Layout:
    """An OCI layout that is being written: layers, then `finish`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._blobs = directory / "blobs" / "sha256"
        self._blobs.mkdir(parents=True)
        self._layers: list[Layer] = []
        self.raw_bytes = 0

    @contextlib.contextmanager
    def layer(self, *, level: int = 6) -> Iterator[_LayerFile]:
        """Write a tar into it. Level 0 leaves it uncompressed."""
        part = self._blobs / "part"
        with part.open("wb") as sink:
            file = _LayerFile(sink, level)
            yield file
            file.end()
        digest = file.packed.hexdigest()
        part.rename(self._blobs / digest)
        kind = f"{_MEDIA}.layer.v1.tar{'+gzip' if level else ''}"
        size = (self._blobs / digest).stat().st_size
        self._layers.append(Layer(f"sha256:{digest}", f"sha256:{file.raw.hexdigest()}", size, kind))
        self.raw_bytes += file.raw_bytes

    def finish(self, config: Mapping[str, Any], *, created: int | None = None, history: Sequence[str] = ()) -> str:
        """Config, manifest and index; the manifest's digest. `config` is what an image says of how to run it."""
        seconds = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()) if created is None else created
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
        written = self._put(
            f"{_MEDIA}.config.v1+json",
            {
                "created": at,
                "architecture": ARCHITECTURES[platform.machine()],
                "os": "linux",
                "config": dict(config),
                "rootfs": {"type": "layers", "diff_ids": [each.diff_id for each in self._layers]},
                "history": [{"created": at, "created_by": line} for line in history],
            },
        )
        layers = [{"mediaType": each.media_type, "digest": each.digest, "size": each.size} for each in self._layers]
        kind = f"{_MEDIA}.manifest.v1+json"
        manifest = self._put(kind, {"schemaVersion": 2, "mediaType": kind, "config": written, "layers": layers})
        named = {**manifest, "annotations": {"org.opencontainers.image.ref.name": TAG}}
        (self.directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
        (self.directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        return str(manifest["digest"])

    def _put(self, media_type: str, document: object) -> dict[str, Any]:
        data = json.dumps(document).encode()
        name = hashlib.sha256(data).hexdigest()
        (self._blobs / name).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{name}", "size": len(data)}


# ------------------------------------------------------------------------------------ kept and pushed


def cache_directory() -> Path:
    """As tools/cache.sh has it."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cloche-build"
    found = Path(os.environ.get("CLOCHE_BUILD_CACHE") or usual)
    found.mkdir(parents=True, exist_ok=True)
    return found


def recipe_hash(*parts: object) -> str:
    """Of words, and of files by their content."""
    whole = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else str(part).encode()
        whole.update(hashlib.sha256(data).digest())
    return whole.hexdigest()[:16]


def cached(kind: str, key: str, make: Callable[[Path], None]) -> Path:
    """The directory that `make` fills, made once for a key. Others of the same kind go: they are large."""
    place = cache_directory()
    done = place / f"{kind}-{key}"
    with (place / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.is_dir():
            return done
        work = Path(tempfile.mkdtemp(prefix=f"{kind}-work.", dir=place))
        try:
            make(work)
            work.chmod(0o755)
            for old in place.glob(f"{kind}-{'?' * len(key)}"):
                shutil.rmtree(old)
            work.rename(done)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return done


def push(layout: Path, name: str) -> None:
    """To a registry without TLS, by skopeo: HOST:PORT/REPOSITORY:TAG."""
    argv = ["skopeo", "--insecure-policy", "copy", "--quiet", "--dest-tls-verify=false"]
    subprocess.run([*argv, f"oci:{layout}:{TAG}", f"docker://{name}"], check=True)
