"""Writes bin/manifest.json of cloche-engine: the release and the SHA-256 of each file.

Standard library only: it runs in setup, before the environment exists.
"""

import hashlib
import json
from pathlib import Path

_BIN = Path(__file__).parents[1] / "packages/cloche-engine/src/cloche_engine/bin"


def _sha256(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def main() -> None:
    """Replace the manifest by one of what is there now."""
    binaries = [
        path
        for path in sorted(_BIN.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o111
    ]
    document = {
        "version": (_BIN / "RELEASE").read_text().strip(),
        "sha256": {str(path.relative_to(_BIN)): _sha256(path) for path in binaries},
    }
    made = _BIN / "manifest.json.part"
    made.write_text(json.dumps(document, indent=2) + "\n")
    made.replace(_BIN / "manifest.json")


if __name__ == "__main__":
    main()
