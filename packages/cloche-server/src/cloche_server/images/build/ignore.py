"""`.dockerignore`: which names of a context a build does not see. Pure; the rules are moby's patternmatcher's.

The last pattern that matches a name or one of its parents decides; `!` takes a name back; `**` is any number of directories; a `#` in
the first column is a comment. A Dockerfile may have an ignore file of its own: `NAME.dockerignore` beside it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from typing import Final

from cloche.wire.errors import error
from cloche_server.images.build.glob import (
    ALL,
    CHAR,
    DIRS,
    STAR,
    Automaton,
    BadPattern,
    State,
    Token,
    character_class,
    match_tokens,
)
from cloche_server.images.build.problems import shown

FILE_BYTES_MAX: Final = 64 * 1024
DEFAULT_NAME: Final = ".dockerignore"


def candidates(dockerfile: str) -> tuple[str, str]:
    """Where it is looked for: the Dockerfile's own first."""
    return f"{dockerfile}{DEFAULT_NAME}", DEFAULT_NAME


def clean(path: str) -> str:
    """Go's `path.Clean`."""
    cleaned = posixpath.normpath(path) if path else "."
    return cleaned[1:] if cleaned.startswith("//") else cleaned


def lines(data: bytes) -> list[tuple[int, str]]:
    """Patterns with their line numbers, as `ignorefile.ReadAll` gives them."""
    if len(data) > FILE_BYTES_MAX:
        raise error("dockerfile_invalid", f"The ignore file is longer than {FILE_BYTES_MAX} bytes.")
    found = []
    for number, line in enumerate(data.decode("utf-8-sig", "surrogateescape").split("\n"), start=1):
        if line.startswith("#"):
            continue
        pattern = line.strip()
        inverted = pattern.startswith("!")
        if inverted:
            pattern = pattern[1:].strip()
        if pattern:
            pattern = clean(pattern)
            if len(pattern) > 1 and pattern.startswith("/"):
                pattern = pattern[1:]
        if inverted:
            pattern = "!" + pattern
        if pattern:
            found.append((number, pattern))
    return found


class Ignore:
    """Decides by name. Give parents before what is in them: then each name costs only its own characters."""

    def __init__(self, data: bytes) -> None:
        tokens: list[list[Token]] = []
        self._inverted: list[bool] = []
        for number, pattern in lines(data):
            inverted = pattern.startswith("!")
            plain = clean(pattern).removeprefix("!") if inverted else pattern
            try:
                if not plain:
                    raise BadPattern("!")
                match_tokens(plain)
                tokens.append(_tokens(plain))
            except BadPattern as bad:
                raise error(
                    "dockerfile_invalid", f"The ignore file, line {number}: {shown(pattern)!r} is not a pattern."
                ) from bad
            self._inverted.append(inverted)
        try:
            self._automaton = Automaton(tokens)
        except BadPattern as bad:
            raise error("dockerfile_invalid", f"The ignore file has {bad}.") from bad
        self._parents: dict[str, tuple[State, frozenset[int]]] = {"": (self._automaton.start, frozenset())}

    def ignores(self, path: str) -> bool:
        """`path` is relative and clean."""
        if not self._inverted:
            return False
        matched = self._reached(path)[1]
        ignored = False
        for index in sorted(matched):
            ignored = not self._inverted[index]
        return ignored

    def _reached(self, path: str) -> tuple[State, frozenset[int]]:
        known = self._parents.get(path)
        if known is None:
            parent, slash, name = path.rpartition("/")
            state, above = self._reached(parent)
            state = self._automaton.after(state, slash + name)
            known = (state, above | state.matched)
            self._parents[path] = known
        return known


def _tokens(pattern: str) -> list[Token]:
    """moby's `Pattern.compile`, with its special cases for `**` at the start and the end."""
    if pattern.startswith("**") and not any(char in "*?[]\\" for char in pattern[2:]):
        rest = pattern[2:]
        if rest.startswith("/"):
            return [Token(DIRS), *(Token(CHAR, char) for char in rest[1:])]
        return [Token(ALL), *(Token(CHAR, char) for char in rest)]
    found: list[Token] = []
    at = 0
    while at < len(pattern):
        if pattern.startswith("**", at):
            at += 2
            if pattern.startswith("/", at):
                at += 1
            found.append(Token(ALL if at == len(pattern) else DIRS))
            continue
        if pattern[at] == "*":
            at += 1
            found.append(Token(STAR))
            continue
        end = _element_end(pattern, at)
        found += match_tokens(pattern[at:end])
        at = end
    return found


def _element_end(pattern: str, at: int) -> int:
    if pattern[at] == "\\":
        return at + 2
    if pattern[at] != "[":
        return at + 1
    return character_class(pattern, at + 1)[1]


def kept(paths: Iterable[str], ignore: Ignore) -> set[str]:
    """What a build sees of a context: what is not ignored, and the directories above it."""
    seen = {path for path in paths if not ignore.ignores(path)}
    for path in list(seen):
        parent = posixpath.dirname(path)
        while parent and parent not in seen:
            seen.add(parent)
            parent = posixpath.dirname(parent)
    return seen
