"""Images as the API shows them, from the store's records."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any, Final

from cloche.wire.images import ImageConfig, ImageView, LostOnConversion
from cloche_server.images import manifest, reference
from cloche_server.images.layout import ImageRecord
from cloche_server.images.prebuilt import Prebuilt, Root
from cloche_server.images.store import Store

LABELS_SHOWN_MAX: Final = 256
CONFIG_REMEMBERED_BYTES_MAX: Final = 64 * 1024


def image_view(store: Store, image: ImageRecord, owner: str | None, is_admin: bool, uses: Counter[str]) -> ImageView:
    root = store.roots.get(image.root) if image.root is not None else None
    config = config_of(store, image)
    return ImageView(
        digest=image.digest,
        names=[familiar(each.name) for each in store.names_of(image.digest, owner, is_admin)],
        platform=image.platform,
        source=image.source,
        layers=len(image.layers),
        size_bytes=sum(layer.size for layer in image.layers),
        root_bytes=root.root_bytes if root is not None else 0,
        entries=root.entries if root is not None else 0,
        created=image.created,
        added_at=image.added_at,
        used_at=store.used_at(image.digest),
        signed_by=list(image.signed_by),
        private=not image.public,
        in_use=0 if image.root_file is None else uses[image.root_file],
        config=ImageConfig(
            entrypoint=list(config.entrypoint),
            cmd=list(config.cmd),
            env=dict(config.env),
            user=config.user,
            workdir=config.workdir,
            labels=dict(list(config.labels.items())[:LABELS_SHOWN_MAX]),
        ),
        lost=_lost(root.lost if root is not None else {}),
    )


def prebuilt_view(prebuilt: Prebuilt, root: Root, uses: Counter[str]) -> ImageView:
    found = prebuilt.file(root.name).stat()
    return ImageView(
        digest=root.digest or "",
        names=[root.name],
        platform=str(manifest.host_platform()),
        source="prebuilt",
        layers=0,
        size_bytes=0,
        root_bytes=found.st_size,
        added_at=found.st_mtime,
        used_at=found.st_mtime,
        in_use=uses[root.file],
        config=ImageConfig(
            entrypoint=list(root.entrypoint),
            cmd=list(root.cmd),
            env=dict(root.env),
            user=root.user,
            workdir=root.workdir,
        ),
    )


def root_of(store: Store, image: ImageRecord, name: str) -> Root:
    """What a sandbox starts from; the image's root is there."""
    assert image.root_file is not None, "it was made before it is given out"
    config = config_of(store, image)
    return Root(
        name=name,
        file=image.root_file,
        digest=image.digest,
        user=config.user,
        workdir=config.workdir,
        env=dict(config.env),
        entrypoint=config.entrypoint,
        cmd=config.cmd,
    )


def config_of(store: Store, image: ImageRecord) -> manifest.ImageConfig:
    if image.config_size > CONFIG_REMEMBERED_BYTES_MAX:
        return _config.__wrapped__(store, image.config, image.config_size)
    return _config(store, image.config, image.config_size)


@lru_cache(maxsize=256)
def _config(store: Store, digest: str, size: int) -> manifest.ImageConfig:
    """A blob's bytes never change, so neither does what they mean."""
    return manifest.parse_config(store.read_blob(digest, size))


def familiar(name: str) -> str:
    return reference.parse(name).familiar


def _lost(lost: dict[str, Any]) -> LostOnConversion:
    return LostOnConversion(
        **{name: lost[name] for name in LostOnConversion.model_fields if name in lost},
    )
