"""What an image is made of, as its JSON says: manifests, indexes of platforms, configs. Pure; all of it is hostile.

Docker's schema 2 and OCI. A document that could be read as a manifest and as an index, that names a key twice, or whose
own media type is not the one it was sent as, is refused: two readers could see two images in it.
"""

from __future__ import annotations

import platform as machine
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from cloche.wire.errors import error
from cloche_server.images.reference import is_digest, shown
from cloche_server.images.strict import refused, strict_json

MIB: Final = 1024 * 1024
MANIFEST_BYTES_MAX: Final = 4 * MIB
CONFIG_BYTES_MAX: Final = 8 * MIB
LAYER_BYTES_MAX: Final = 64 * 1024 * MIB
LAYERS_MAX: Final = 128
INDEX_ENTRIES_MAX: Final = 1024
STRING_BYTES_MAX: Final = 128 * 1024
"""The kernel's own limit of one argument or variable."""
LIST_MAX: Final = 4096

OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX: Final = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
OCI_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
DOCKER_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX: Final = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG: Final = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER: Final = "application/vnd.docker.image.rootfs.diff.tar"
MANIFESTS: Final = (OCI_MANIFEST, DOCKER_MANIFEST)
INDEXES: Final = (OCI_INDEX, DOCKER_INDEX)
ACCEPTED: Final = (*MANIFESTS, *INDEXES)
COMPRESSIONS: Final = {
    OCI_LAYER: "none",
    f"{OCI_LAYER}+gzip": "gzip",
    f"{OCI_LAYER}+zstd": "zstd",
    DOCKER_LAYER: "none",
    f"{DOCKER_LAYER}.gzip": "gzip",
    f"{DOCKER_LAYER}.zstd": "zstd",
}
_GENERIC: Final = ("", "application/json", "application/octet-stream", "text/plain", "binary/octet-stream")
"""What servers of plain files say."""
_FOREIGN: Final = ("nondistributable", "foreign")
_ARCHITECTURES: Final = {"x86_64": "amd64", "x86-64": "amd64", "aarch64": "arm64", "i386": "386", "i686": "386"}
_PLATFORM_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
_ARM: Final = ("v8", "v7", "v6", "v5")


@dataclass(frozen=True)
class Descriptor:
    """Bytes that are somewhere else: their kind, hash and length."""

    media_type: str
    digest: str
    size: int


@dataclass(frozen=True)
class Layer(Descriptor):
    """One layer of a root file system; `compression` is none, gzip or zstd."""

    compression: str


@dataclass(frozen=True)
class Platform:
    """`linux/amd64`, `linux/arm/v7`."""

    os: str
    architecture: str
    variant: str | None = None

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


@dataclass(frozen=True)
class IndexEntry(Descriptor):
    """A manifest of an index, and what it is for; an attestation is for no platform that exists."""

    platform: Platform | None = None


@dataclass(frozen=True)
class Manifest:
    """One image of one platform."""

    media_type: str
    config: Descriptor
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Index:
    """One image of several platforms."""

    media_type: str
    manifests: tuple[IndexEntry, ...]


@dataclass(frozen=True)
class ImageConfig:
    """How the image wants to be run. `raw` is the whole document, for those who make a new image of it."""

    architecture: str
    os: str
    variant: str | None
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    env: dict[str, str]
    user: str | None
    workdir: str | None
    labels: dict[str, str]
    shell: tuple[str, ...] | None
    exposed: tuple[str, ...]
    volumes: tuple[str, ...]
    stop_signal: str | None
    created: str | None
    diff_ids: tuple[str, ...]
    raw: dict[str, Any] = field(repr=False)

    @property
    def platform(self) -> Platform:
        return Platform(self.os, self.architecture, self.variant)


def parse_manifest(data: bytes, media_type: str | None) -> Manifest | Index:
    """The document, which was sent as `media_type`; `image_refused` names what is wrong."""
    document = strict_json(data, MANIFEST_BYTES_MAX, "manifest")
    kind = manifest_type(document, media_type)
    if kind in INDEXES:
        entries = _list(document, "manifests", INDEX_ENTRIES_MAX, "manifest")
        return Index(kind, tuple(_entry(each) for each in entries))
    config = parse_descriptor(document.get("config"), CONFIG_BYTES_MAX, "config")
    if config.media_type not in (OCI_CONFIG, DOCKER_CONFIG):
        raise refused("not_an_image", f"This is no image: its config is of type {shown(config.media_type)}.")
    layers = _list(document, "layers", LAYERS_MAX, "manifest")
    return Manifest(kind, config, tuple(_layer(each) for each in layers))


def manifest_type(document: dict[str, Any], sent_as: str | None) -> str:
    """Which of the four it is. Its own word, the sender's and its shape must agree."""
    sent = (sent_as or "").partition(";")[0].strip().lower()
    own = document.get("mediaType")
    if own is not None and not isinstance(own, str):
        raise refused("bad_manifest", "The manifest's mediaType is not a text.")
    if document.get("schemaVersion") != 2 or isinstance(document.get("schemaVersion"), bool):
        raise refused("unsupported_manifest", "Only manifests of schema version 2 are supported.")
    is_index, is_manifest = "manifests" in document, "layers" in document or "config" in document
    if is_index == is_manifest:
        raise refused("bad_manifest", "It is not clear whether this is a manifest or an index.")
    sent = (own or (OCI_INDEX if is_index else OCI_MANIFEST)) if sent in _GENERIC else sent
    if own is not None and own != sent:
        raise refused("media_type", f"The manifest was sent as {shown(sent)} and calls itself {shown(own)}.")
    if sent not in (INDEXES if is_index else MANIFESTS):
        raise refused("media_type", f"{shown(sent)} is not a type of manifest that has this content.")
    return sent


def choose(index: Index, platform: Platform | str) -> IndexEntry:
    """The manifest for that platform: the same variant first, then those it can run, in the index's order."""
    wanted = parse_platform(platform) if isinstance(platform, str) else platform
    for variant in _variants(wanted):
        for entry in index.manifests:
            has = entry.platform
            if has is None or entry.media_type not in MANIFESTS:
                continue
            if (has.os, has.architecture) == (wanted.os, wanted.architecture) and has.variant == variant:
                return entry
    known = sorted({str(each.platform) for each in index.manifests if each.platform and each.platform.os != "unknown"})
    text = ", ".join(shown(each, 40) for each in known[:20]) or "none that is named"
    raise error(
        "image_not_found",
        f"The image is not for {shown(str(wanted))}; it is for: {text}.",
        detail={"platform": str(wanted)},
        fix="Ask for a platform that the image has, or use another image.",
    )


def matches(config: ImageConfig, platform: Platform | str) -> bool:
    """Whether an image without index is for that platform."""
    wanted = parse_platform(platform) if isinstance(platform, str) else platform
    has = _platform({"os": config.os, "architecture": config.architecture, "variant": config.variant})
    same = (has.os, has.architecture) == (wanted.os, wanted.architecture)
    return same and has.variant in _variants(wanted)


def parse_platform(text: str) -> Platform:
    """`linux/arm64/v8`, `linux/amd64`, or an architecture alone."""
    parts = text.split("/")
    parts = ["linux", *parts] if len(parts) == 1 else parts
    if len(parts) > 3 or not all(_PLATFORM_PART.fullmatch(part) for part in parts):
        raise error("invalid_request", f"'{shown(text, 60)}' is not a platform, such as linux/amd64.")
    return _platform({"os": parts[0], "architecture": parts[1], "variant": parts[2] if len(parts) == 3 else None})


def host_platform() -> Platform:
    """What this machine runs."""
    return parse_platform(machine.machine())


def parse_config(data: bytes) -> ImageConfig:
    """The image's config; `image_refused` names what is wrong."""
    raw = strict_json(data, CONFIG_BYTES_MAX, "config")
    run = raw.get("config")
    run = {} if run is None else run
    rootfs = raw.get("rootfs")
    if not isinstance(run, dict) or not isinstance(rootfs, dict) or rootfs.get("type") != "layers":
        raise refused("bad_config", "The image's config has no list of layers, or its run settings are no table.")
    diff_ids = _list(rootfs, "diff_ids", LAYERS_MAX, "config")
    if not all(is_digest(each) for each in diff_ids):
        raise refused("bad_config", "The config names a layer by something that is not a sha256 digest.")
    shell = _strings(run, "Shell")
    return ImageConfig(
        architecture=_text(raw, "architecture") or "",
        os=_text(raw, "os") or "",
        variant=_text(raw, "variant"),
        entrypoint=_strings(run, "Entrypoint"),
        cmd=_strings(run, "Cmd"),
        env=_environment(_strings(run, "Env")),
        user=_text(run, "User"),
        workdir=_text(run, "WorkingDir"),
        labels=_labels(run),
        shell=shell or None,
        exposed=_keys(run, "ExposedPorts"),
        volumes=_keys(run, "Volumes"),
        stop_signal=_text(run, "StopSignal"),
        created=_text(raw, "created"),
        diff_ids=tuple(diff_ids),
        raw=raw,
    )


def check_pair(manifest: Manifest, config: ImageConfig) -> None:
    """A manifest and a config that count different layers do not belong together."""
    if len(manifest.layers) != len(config.diff_ids):
        raise refused(
            "layer_count", f"The manifest has {len(manifest.layers)} layers, the config {len(config.diff_ids)}."
        )


def parse_descriptor(value: object, bytes_max: int, what: str) -> Descriptor:
    if not isinstance(value, dict):
        raise refused("bad_manifest", f"The manifest's {what} is not a descriptor.")
    media_type, digest, size = value.get("mediaType"), value.get("digest"), value.get("size")
    if not isinstance(media_type, str) or not 0 < len(media_type) <= 255:
        raise refused("bad_manifest", f"The manifest's {what} has no media type.")
    if not is_digest(digest):
        said = shown(digest, 80) if isinstance(digest, str) else "nothing"
        raise refused("bad_digest", f"The manifest's {what} is named by {said}; only sha256 digests are supported.")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= bytes_max:
        raise refused("bad_size", f"The manifest's {what} has a size that is not between 0 and {bytes_max} bytes.")
    return Descriptor(media_type, str(digest), size)


def _layer(value: object) -> Layer:
    found = parse_descriptor(value, LAYER_BYTES_MAX, "layer")
    compression = COMPRESSIONS.get(found.media_type)
    if compression is None:
        if any(word in found.media_type for word in _FOREIGN):
            raise refused("foreign_layer", "A layer is not in the registry but at an address of its own.")
        raise refused("layer_type", f"A layer is of type {shown(found.media_type)}, which is not a file system's.")
    return Layer(found.media_type, found.digest, found.size, compression)


def _entry(value: object) -> IndexEntry:
    found = parse_descriptor(value, MANIFEST_BYTES_MAX, "entry")
    assert isinstance(value, dict)
    platform = value.get("platform")
    if platform is not None and not isinstance(platform, dict):
        raise refused("bad_manifest", "The platform of an index's entry is not a table.")
    return IndexEntry(found.media_type, found.digest, found.size, _platform(platform) if platform else None)


def _platform(value: dict[str, Any]) -> Platform:
    parts = [value.get(name) for name in ("os", "architecture", "variant")]
    if any(part is not None and (not isinstance(part, str) or len(part) > 64) for part in parts):
        raise refused("bad_manifest", "A platform is named by something that is not a short text.")
    system, architecture, variant = (str(part or "").lower() for part in parts)
    architecture = _ARCHITECTURES.get(architecture, architecture)
    if architecture in ("armhf", "armel"):
        architecture, variant = "arm", "v7" if architecture == "armhf" else "v6"
    plain = {"arm64": ("v8", "8"), "amd64": ("v1",), "arm": ()}.get(architecture, ())
    if architecture == "arm":
        variant = variant if variant.startswith("v") or not variant else f"v{variant}"
        variant = variant or "v7"
    return Platform(system, architecture, variant if variant and variant not in plain else None)


def _variants(wanted: Platform) -> tuple[str | None, ...]:
    """What a machine of that variant can run, best first. A variant of amd64 or arm64 also runs the plain one."""
    if wanted.architecture == "arm" and wanted.variant in _ARM:
        return _ARM[_ARM.index(wanted.variant) :]
    return (wanted.variant,) if wanted.variant is None else (wanted.variant, None)


_T = TypeVar("_T")


def _get(table: dict[str, Any], name: str, good: Callable[[Any], bool], default: _T) -> _T:
    value = table.get(name)
    if value is None:
        return default
    if not good(value):
        raise refused("bad_config", f"{name} in the image's config is not what it must be.")
    found: _T = value
    return found


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value and len(value.encode()) < STRING_BYTES_MAX


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and len(value) <= LIST_MAX and all(_is_text(key) for key in value)


def _text(table: dict[str, Any], name: str) -> str | None:
    return _get(table, name, _is_text, "") or None


def _strings(table: dict[str, Any], name: str) -> tuple[str, ...]:
    def good(value: object) -> bool:
        return isinstance(value, list) and len(value) <= LIST_MAX and all(_is_text(each) for each in value)

    empty: list[str] = []
    return tuple(_get(table, name, good, empty))


def _labels(table: dict[str, Any]) -> dict[str, str]:
    empty: dict[str, str] = {}
    return dict(
        _get(table, "Labels", lambda value: _is_table(value) and all(_is_text(each) for each in value.values()), empty)
    )


def _keys(table: dict[str, Any], name: str) -> tuple[str, ...]:
    empty: dict[str, Any] = {}
    return tuple(_get(table, name, _is_table, empty))


def _environment(entries: tuple[str, ...]) -> dict[str, str]:
    env = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        if not name:
            raise refused("bad_config", "Env in the image's config has an entry without a name.")
        env[name] = value
    return env


def _list(table: dict[str, Any], name: str, count_max: int, what: str) -> list[Any]:
    value = table.get(name, ())
    value = [] if value is None else value  # Go writes an empty list so
    if not isinstance(value, list):
        raise refused(f"bad_{what}", f"{name} in the {what} is not a list.")
    if len(value) > count_max:
        raise refused(f"too_many_{name}", f"{name} in the {what} has more than {count_max} entries.")
    return value
