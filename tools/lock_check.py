"""Says which declared dependencies are missing from the locks.

The full answer needs the index (`just lock`); this one works without it and catches
the common slip: a new name in a pyproject.toml and no new pin.
"""

import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

_ROOT = Path(__file__).parents[1]
_OURS = {"cloche", "cloche-server", "cloche-engine"}


def _pins(lock: Path) -> dict[str, str]:
    found = re.findall(r"^([a-z0-9._-]+)==(\S+)", lock.read_text(), flags=re.MULTILINE)
    return dict(found)


def _declared(lock_name: str) -> list[Requirement]:
    root = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    texts: list[str] = list(root["dependency-groups"][lock_name])
    if lock_name == "dev":
        for package in sorted((_ROOT / "packages").glob("*/pyproject.toml")):
            texts += tomllib.loads(package.read_text())["project"]["dependencies"]
    return [Requirement(text) for text in texts]


def missing(lock_name: str) -> list[str]:
    """Declared requirements that the lock lacks, or pins outside their range."""
    pins = _pins(_ROOT / "requirements" / f"{lock_name}.lock")
    return [
        str(wanted)
        for wanted in _declared(lock_name)
        if wanted.name not in _OURS and not wanted.specifier.contains(pins.get(wanted.name, "0"))
    ]


def main() -> int:
    """Report on every lock; the exit code is 1 when anything is missing."""
    lacking = [f"{name}.lock: {what}" for name in ("dev", "build", "bootstrap") for what in missing(name)]
    for line in lacking:
        print(f"{line} is declared but not locked; run `just lock`", file=sys.stderr)
    return 1 if lacking else 0


if __name__ == "__main__":
    raise SystemExit(main())
