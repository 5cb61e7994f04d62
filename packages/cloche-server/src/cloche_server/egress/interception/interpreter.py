"""Which Python the interceptor runs with: found without running anything.

The tested versions are data beside the interceptor (`python.txt`, best first). Looked at: what `CLOCHE_INTERCEPTOR_PYTHON`
names, the daemon's own, `PATH`, and where pyenv and uv install for this user. A wrapper script is no interpreter.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

VARIABLE: Final = "CLOCHE_INTERCEPTOR_PYTHON"
PROGRAM: Final = Path(__file__).resolve().parents[2] / "interceptor"
VERSIONS_FILE: Final = PROGRAM / "python.txt"
LOCK_FILE: Final = PROGRAM / "requirements.lock"
_VERSION: Final = re.compile(r"3\.[0-9]{1,2}")
_NAME: Final = re.compile(r"python(3\.[0-9]{1,2})")
_ELF: Final = b"\x7fELF"
_INSTALLED: Final = (".pyenv/versions/{}.*/bin", ".local/share/uv/python/cpython-{}*/bin")


@dataclass(frozen=True)
class Interpreter:
    """`prefix/bin/python<version>`, with its library below the same prefix."""

    prefix: Path
    version: str

    @property
    def executable(self) -> Path:
        return self.prefix / "bin" / f"python{self.version}"


def versions_tested(file: Path = VERSIONS_FILE) -> tuple[str, ...]:
    """Best first."""
    lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    return tuple(line for line in lines if _VERSION.fullmatch(line))


def find(
    environ: Mapping[str, str] | None = None, *, home: Path | None = None, versions: tuple[str, ...] | None = None
) -> Interpreter | None:
    """The first that fits. The one that the operator named is taken, or none."""
    environ = os.environ if environ is None else environ
    versions = versions_tested() if versions is None else versions
    named = environ.get(VARIABLE, "").strip()
    if named:
        return _at(Path(named), versions)
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    for version in versions:
        candidates = [Path(sys.base_prefix, "bin", f"python{own}")] if own == version else []
        candidates += _on_path(environ, version)
        candidates += _installed(home, version)
        for candidate in candidates:
            found = _at(candidate, versions)
            if found is not None:
                return found
    return None


def closed_to_others(found: Interpreter) -> Path | None:
    """The first of its files that the interceptor, which is another user, could not read. Directories above do not matter."""
    library = found.prefix / "lib" / f"python{found.version}"
    for path in (found.prefix, found.prefix / "bin", found.executable, library.parent, library, library / "os.py"):
        wanted = 0o4 if path.name == "os.py" else 0o5
        try:
            mode = path.stat().st_mode
        except OSError:  # it was there when it was found
            return path
        if mode & wanted != wanted:
            return path
    return None


def why_none(versions: tuple[str, ...]) -> str:
    wanted = " or ".join(versions)
    return f"Interception needs Python {wanted} on the node, and there is none."


def fix_for_none(versions: tuple[str, ...]) -> str:
    return f"Install Python {versions[0]}, or name one with {VARIABLE}=/path/to/python{versions[0]}; then: cloche up --replace"


def _on_path(environ: Mapping[str, str], version: str) -> Iterator[Path]:
    for directory in environ.get("PATH", os.defpath).split(os.pathsep):
        if directory.startswith("/"):
            yield Path(directory, f"python{version}")


def _installed(home: Path | None, version: str) -> Iterator[Path]:
    base = home or Path(os.path.expanduser("~"))
    for pattern in _INSTALLED:
        try:
            yield from sorted(base.glob(f"{pattern.format(version)}/python{version}"), reverse=True)
        except OSError:  # a home that cannot be looked into
            continue


def _at(candidate: Path, versions: tuple[str, ...]) -> Interpreter | None:
    """The interpreter at this path, when it is one: a program, with its library where it looks for it itself."""
    try:
        real = candidate.resolve(strict=True)
        name = _NAME.fullmatch(real.name)
        if name is None or name[1] not in versions or not _is_program(real):
            return None
    except OSError:
        return None
    prefix = real.parent.parent
    if real.parent.name != "bin" or not (prefix / "lib" / f"python{name[1]}" / "os.py").is_file():
        return None
    return Interpreter(prefix, name[1])


def _is_program(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_ELF)) == _ELF
