"""The image store of a node: what it is opened with, and which image is the default."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import cloche_engine
from cloche.wire import defaults
from cloche.wire.errors import error
from cloche_server.engines.converter import command
from cloche_server.images.service import Images
from cloche_server.images.settings import RegistrySettings, load_settings
from cloche_server.images.trust import FILE as TRUST_FILE
from cloche_server.images.trust import TrustPolicy, load_policy
from cloche_server.images.worker import Converter, Started, Starter

IMAGE_VARIABLE: Final = "CLOCHE_IMAGE"
TRUST_VARIABLE: Final = "CLOCHE_TRUST"
PREBUILT: Final = "python"
"""A root file system of this name, made elsewhere and given to the node, is its default."""


async def _no_converter(*, memory_bytes: int, disk_bytes: int) -> Started:
    raise error("engine_missing", "This node has no image converter.")


@dataclass(frozen=True)
class Stock:
    """What a node is told about its images."""

    prebuilt: Path
    """Roots made elsewhere; only read."""
    store: Path
    """The store, which is this node's alone."""
    default: str | None = None
    """The operator's choice."""
    registries: RegistrySettings = field(default_factory=RegistrySettings)
    trust: TrustPolicy | None = None
    start: Starter = _no_converter

    @property
    def default_image(self) -> str:
        if self.default is not None:
            return self.default
        return PREBUILT if (self.prebuilt / f"{PREBUILT}.erofs").is_file() else defaults.IMAGE


def stock_of(
    prebuilt: Path, store: Path, config_dir: Path, start: Starter, environ: Mapping[str, str] | None = None
) -> Stock:
    """From the environment and the files of the node's configuration. What they say wrongly is an error by name."""
    environ = os.environ if environ is None else environ
    return Stock(
        prebuilt=prebuilt,
        store=store,
        default=environ.get(IMAGE_VARIABLE, "").strip() or None,
        registries=load_settings(config_dir, environ),
        trust=_trust(config_dir, environ),
        start=start,
    )


def _trust(config_dir: Path, environ: Mapping[str, str]) -> TrustPolicy | None:
    """A policy that was named must be there: without it nothing would be asked of an image."""
    named = environ.get(TRUST_VARIABLE, "").strip()
    if named:
        return load_policy(Path(named))
    return load_policy(config_dir / TRUST_FILE) if (config_dir / TRUST_FILE).exists() else None


async def open_images(stock: Stock, converter: Converter, in_use: Callable[[], Iterable[str]]) -> Images:
    """Raises store_busy."""
    try:
        agent = cloche_engine.agent_path()
    except cloche_engine.EngineMissing as missing:
        raise error("engine_missing", str(missing)) from missing
    return await Images.open(
        stock.store,
        settings=stock.registries,
        converter=converter,
        converter_version=converter_version(agent.parent),
        agent=agent,
        in_use=in_use,
        trust=stock.trust,
        prebuilt=stock.prebuilt,
    )


def bytes_of(stock: Stock, images: Images) -> int:
    """On the disk, of the store and of the roots made elsewhere. Blocks."""
    return images.size_bytes() + sum(path.stat().st_size for path in stock.prebuilt.glob("*.erofs"))


def converter_version(binaries: Path) -> str:
    """Another one makes other bytes of the same layers, perhaps: then roots are made anew."""
    found = hashlib.sha256()
    for name in (command.BINARY, command.MKFS):
        try:
            found.update(hashlib.sha256((binaries / name).read_bytes()).digest())
        except FileNotFoundError:
            found.update(b"-")  # nothing can be converted with it
    return found.hexdigest()[:32]
