"""Roots that were made elsewhere: NAME.erofs, and NAME.json that describes it, in the images directory. Never changed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cloche.wire.errors import error

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,100}")
DESCRIPTION_BYTES_MAX: Final = 1024 * 1024
UNDESCRIBED_USER: Final = "1000:1000"
"""Who runs in an image that came without its description: never root."""


@dataclass(frozen=True)
class Root:
    """What a sandbox starts from, and what its commands start with. `file` is below the images directory."""

    name: str
    file: str
    digest: str | None
    user: str | None
    workdir: str | None
    env: dict[str, str]
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


class Prebuilt:
    """Looks a bare name up; a description is read again when its file changes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, tuple[int, Root]] = {}

    def find(self, name: str) -> Root | None:
        """Raises image_not_found for a description that cannot be read."""
        if not NAME.fullmatch(name):
            return None
        file, description = self._directory / f"{name}.erofs", self._directory / f"{name}.json"
        if not file.is_file():
            return None
        if not description.is_file():
            return Root(name, file.name, digest=None, user=UNDESCRIBED_USER, workdir=None, env={})
        changed_ns = description.stat().st_mtime_ns
        known = self._known.get(name)
        if known is None or known[0] != changed_ns:
            known = (changed_ns, _parse(name, file.name, description))
            self._known[name] = known
        return known[1]

    def file(self, name: str) -> Path:
        return self._directory / f"{name}.erofs"

    def names(self) -> list[str]:
        if not self._directory.is_dir():
            return []
        return sorted(path.stem for path in self._directory.glob("*.erofs") if NAME.fullmatch(path.stem))


def _parse(name: str, file: str, description: Path) -> Root:
    try:
        said = json.loads(description.read_bytes()[:DESCRIPTION_BYTES_MAX])
        config: dict[str, Any] = said.get("config") or {}
        digest = (said.get("content") or {}).get("sha256")
        env = dict(item.split("=", 1) for item in config.get("Env") or [])
        return Root(
            name=name,
            file=file,
            digest=f"sha256:{digest}" if digest else None,
            user=config.get("User") or None,
            workdir=config.get("WorkingDir") or None,
            env=env,
            entrypoint=tuple(config.get("Entrypoint") or ()),
            cmd=tuple(config.get("Cmd") or ()),
        )
    except (ValueError, AttributeError, TypeError) as bad:
        raise error("image_not_found", f"The description of image {name!r} cannot be read: {bad}.") from bad
