"""Puts the built binaries into a platform wheel.

The binaries are git-ignored, so hatchling would leave them out, and they are for one
platform, so the wheel must not call itself `any`. runsc is static: the oldest
manylinux tag is true of it.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_TAG = "py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64"
_BIN = "src/cloche_engine/bin"


class EngineBuildHook(BuildHookInterface[Any]):
    """Names the binaries as artifacts and sets the tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # found in src/ directly
            return
        bin_dir = Path(self.root) / _BIN
        if not (bin_dir / "manifest.json").is_file():
            raise FileNotFoundError(f"{bin_dir}/manifest.json is missing: run `just setup` first")
        build_data["artifacts"] += [
            str(path.relative_to(self.root))
            for path in sorted(bin_dir.rglob("*"))
            # A wheel keeps no symlink: it would carry runsc twice. Made at first use instead.
            if path.is_file() and not path.is_symlink()
        ]
        build_data["pure_python"] = False
        build_data["tag"] = _TAG
