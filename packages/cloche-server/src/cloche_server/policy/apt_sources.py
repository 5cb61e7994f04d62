"""Where apt fetches from: its sources, in the one-line form and in deb822."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

FILES_MAX: Final = 200
FILE_BYTES_MAX: Final = 1024 * 1024

_LINE: Final = re.compile(r"deb(?:-src)?\s+(?:\[[^\]]*\]\s*)?(\S+)\s+\S+")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


def uris_of(directory: Path) -> list[str]:
    """Every http and https URI of enabled sources, each once, in the order of the files. `directory`: /etc/apt."""
    found: dict[str, None] = {}
    parts = directory / "sources.list.d"
    files = [directory / "sources.list", *sorted(parts.iterdir() if parts.is_dir() else ())]
    for path in files[:FILES_MAX]:
        if not _NAME.fullmatch(path.name) or path.suffix not in (".list", ".sources") or not path.is_file():
            continue
        text = path.read_bytes()[:FILE_BYTES_MAX].decode(errors="replace")
        for uri in _one_line(text) if path.suffix == ".list" else _deb822(text):
            plain = uri.removeprefix("mirror+").removeprefix("tor+")
            if plain.startswith("mirror://"):
                plain = "http" + plain.removeprefix("mirror")
            if plain.startswith(("http://", "https://")):
                found[plain] = None
    return list(found)


def _one_line(text: str) -> Iterator[str]:
    for line in text.splitlines():
        match = _LINE.match(line.partition("#")[0].strip())
        if match:
            yield match[1]


def _deb822(text: str) -> Iterator[str]:
    """Stanzas apart by empty lines; a value goes on in lines that start with a blank; `#` lines are comments."""
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n[ \t]*\n", kept):
        values: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line[:1] in (" ", "\t"):
                values[key] = values.get(key, "") + " " + line.strip()
            else:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                values[key] = value.strip()
        if values.get("enabled", "yes").lower() not in ("no", "false", "0", "off", "without"):
            yield from values.get("uris", "").split()
