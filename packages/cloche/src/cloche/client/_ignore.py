"""`.dockerignore`: which files of a context need not be sent. Pure.

The node reads the same file and has the last word; here a file is left out only when no later line can bring it back.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

NAME: Final = ".dockerignore"
BYTES_MAX: Final = 1024 * 1024
LINES_MAX: Final = 10_000


@dataclass(frozen=True)
class Rule:
    """One line: what it matches, and whether it brings back (`!`)."""

    matches: re.Pattern[str]
    brings_back: bool


class Ignore:
    """Rules in order; the last one that matches a path or a directory above it decides."""

    def __init__(self, rules: tuple[Rule, ...] = (), keep: frozenset[str] = frozenset()) -> None:
        self._rules = rules
        self._keep = keep
        self._can_bring_back = any(rule.brings_back for rule in rules)

    @classmethod
    def of(cls, context: Path, dockerfile: str | None) -> Ignore:
        """Of a directory; `NAME` of the Dockerfile's own goes before the context's, as BuildKit has it."""
        for file in ((context / f"{dockerfile}{NAME}") if dockerfile else None, context / NAME):
            if file is not None and file.is_file():
                with file.open("rb") as opened:
                    text = opened.read(BYTES_MAX).decode("utf-8", "replace")
                used = file.relative_to(context).as_posix()
                return cls(parse(text), frozenset(name for name in (dockerfile, used) if name))
        return cls()

    def skips(self, path: str, is_directory: bool) -> bool:
        """`path` relative to the context. A directory is skipped whole, so only when nothing below can come back."""
        if path in self._keep or (is_directory and self._is_above_kept(path)):
            return False
        if is_directory and self._can_bring_back:
            return False
        return self.is_ignored(path)

    def _is_above_kept(self, path: str) -> bool:
        return any(kept.startswith(f"{path}/") for kept in self._keep)

    def is_ignored(self, path: str) -> bool:
        ignored = False
        parts = path.split("/")
        names = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        for rule in self._rules:
            if rule.brings_back == ignored and any(rule.matches.fullmatch(name) for name in names):
                ignored = not rule.brings_back
        return ignored


def parse(text: str) -> tuple[Rule, ...]:
    rules = []
    for line in text.removeprefix("\ufeff").splitlines()[:LINES_MAX]:
        pattern = line.strip()
        if not pattern or line.startswith("#"):
            continue
        brings_back = pattern.startswith("!")
        pattern = posixpath.normpath(pattern.removeprefix("!").strip() or ".").lstrip("/")
        if pattern in (".", ""):
            continue
        compiled = compiled_pattern(pattern)
        if compiled is not None:
            rules.append(Rule(compiled, brings_back))
    return tuple(rules)


def compiled_pattern(pattern: str) -> re.Pattern[str] | None:
    """Go's filepath.Match, and `**` for any number of directories. None for one that is no pattern."""
    out, at = [], 0
    while at < len(pattern):
        if pattern.startswith("**", at):
            at += 2
            if pattern.startswith("/", at):
                at += 1
                out.append("(?:.*/)?")
            else:
                out.append(".*")
            continue
        char = pattern[at]
        at += 1
        if char == "*":
            out.append("[^/]*")
        elif char == "?":
            out.append("[^/]")
        elif char == "[":
            end = pattern.find("]", at + 1)
            if end < 0:
                return None
            inner = pattern[at:end].replace("\\", "\\\\").replace("[", "\\[")
            out.append(f"[{'^' + inner[1:] if inner[:1] == '^' else inner}]")
            at = end + 1
        elif char == "\\" and at < len(pattern):
            out.append(re.escape(pattern[at]))
            at += 1
        else:
            out.append(re.escape(char))
    try:
        return re.compile("".join(out), re.DOTALL)
    except re.error:
        return None
