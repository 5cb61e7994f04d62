"""Images pushed into a registry, byte by byte as the test wants them."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin

import httpx2

from tests.unit.images.registries import RunningRegistry

OCI = "application/vnd.oci.image."
COSIGN = "application/vnd.dev.cosign.simplesigning.v1+json"


@dataclass
class Pushed:
    """One manifest in the registry, and what it is made of."""

    digest: str
    media_type: str
    body: bytes
    config: bytes = b""
    blobs: list[bytes] = field(default_factory=list)

    def descriptor(self, **more: Any) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.body), **more}


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """A layer with these files, the same bytes each time."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(content), 0o755, 1_700_000_000
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=1, mtime=0)


class Pusher:
    """A client of one registry that may write."""

    def __init__(self, registry: RunningRegistry, repository: str) -> None:
        self.base = f"{registry.url}/v2/{repository}"
        self._http = httpx2.Client(verify=registry.tls_context(), headers=registry.push_headers(repository), timeout=60)

    def __enter__(self) -> "Pusher":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def blob(self, data: bytes) -> str:
        digest = sha256(data)
        if self._http.head(f"{self.base}/blobs/{digest}").status_code == 200:
            return digest
        started = self._http.post(f"{self.base}/blobs/uploads/")
        assert started.status_code == 202, started.text
        where = httpx2.URL(urljoin(self.base, started.headers["location"])).copy_merge_params({"digest": digest})
        done = self._http.put(where, content=data, headers={"content-type": "application/octet-stream"})
        assert done.status_code == 201, done.text
        return digest

    def manifest(self, document: Mapping[str, Any], tag: str | None = None) -> Pushed:
        body = json.dumps(document).encode()
        digest, media_type = sha256(body), str(document["mediaType"])
        done = self._http.put(
            f"{self.base}/manifests/{tag or digest}", content=body, headers={"content-type": media_type}
        )
        assert done.status_code == 201, done.text
        return Pushed(digest, media_type, body)


def push(
    registry: RunningRegistry,
    repository: str,
    tag: str | None,
    layers: Sequence[bytes],
    config: Mapping[str, Any] | None = None,
    *,
    platform: str = "linux/amd64",
    compress: bool = True,
    env: Sequence[str] = ("PATH=/usr/bin:/bin",),
) -> Pushed:
    """An OCI image of these tars. `config` is its run settings (Entrypoint, Cmd, User, …)."""
    system, architecture, *variant = platform.split("/")
    document = {
        "architecture": architecture,
        "os": system,
        **({"variant": variant[0]} if variant else {}),
        "config": {"Env": list(env), **(config or {})},
        "rootfs": {"type": "layers", "diff_ids": [sha256(layer) for layer in layers]},
    }
    written = json.dumps(document).encode()
    blobs = [gzipped(layer) if compress else layer for layer in layers]
    kind = f"{OCI}layer.v1.tar{'+gzip' if compress else ''}"
    with Pusher(registry, repository) as pusher:
        for data in (written, *blobs):
            pusher.blob(data)
        pushed = pusher.manifest(
            {
                "schemaVersion": 2,
                "mediaType": f"{OCI}manifest.v1+json",
                "config": {"mediaType": f"{OCI}config.v1+json", "digest": sha256(written), "size": len(written)},
                "layers": [{"mediaType": kind, "digest": sha256(each), "size": len(each)} for each in blobs],
            },
            tag,
        )
    return Pushed(pushed.digest, pushed.media_type, pushed.body, written, blobs)


def push_index(registry: RunningRegistry, repository: str, tag: str | None, images: Mapping[str, Pushed]) -> Pushed:
    """An index of images that are there, by platform."""
    entries = []
    for platform, image in images.items():
        system, architecture, *variant = platform.split("/")
        named = {"os": system, "architecture": architecture, **({"variant": variant[0]} if variant else {})}
        entries.append(image.descriptor(platform=named))
    with Pusher(registry, repository) as pusher:
        return pusher.manifest({"schemaVersion": 2, "mediaType": f"{OCI}index.v1+json", "manifests": entries}, tag)


def push_signatures(
    registry: RunningRegistry, repository: str, digest: str, signatures: Sequence[tuple[bytes, str]]
) -> Pushed:
    """As cosign writes them: payloads as layers, each with its base64 signature as an annotation."""
    config = json.dumps(
        {
            "architecture": "",
            "os": "",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [sha256(p) for p, _ in signatures]},
        }
    ).encode()
    with Pusher(registry, repository) as pusher:
        layers = [
            {
                "mediaType": COSIGN,
                "digest": pusher.blob(payload),
                "size": len(payload),
                "annotations": {"dev.cosignproject.cosign/signature": signature},
            }
            for payload, signature in signatures
        ]
        pusher.blob(config)
        named = {"mediaType": f"{OCI}config.v1+json", "digest": sha256(config), "size": len(config)}
        document = {"schemaVersion": 2, "mediaType": f"{OCI}manifest.v1+json", "config": named, "layers": layers}
        return pusher.manifest(document, digest.replace(":", "-") + ".sig")
