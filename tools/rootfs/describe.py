"""Writes the .json beside an image: what the node must know of it, in the words of an OCI config.

`describe.py IMAGE NAME SUITE PACKAGES AGENT_SHA256` prints it. Standard library only:
it runs in setup, before the environment exists.
"""

import hashlib
import json
import sys
from pathlib import Path


def describe(image: Path, name: str, suite: str, packages: str, agent_sha256: str) -> dict[str, object]:
    """The record of one image; `user` is who commands run as."""
    with image.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return {
        "schema": 1,
        "name": name,
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "User": "1000:1000",
            "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "WorkingDir": "/workspace",
            "Cmd": ["/bin/sh"],
        },
        "content": {"file": image.name, "sha256": digest, "bytes": image.stat().st_size},
        "agent": {"path": "/.cloche/agent", "sha256": None if agent_sha256 == "none" else agent_sha256},
        "made_from": {"debian": suite, "packages": packages.split(",")},
    }


if __name__ == "__main__":
    image_path, *words = sys.argv[1:]
    json.dump(describe(Path(image_path), *words), sys.stdout, indent=2)
    sys.stdout.write("\n")
