"""Patterns of paths. `*` stands for anything within one segment, a segment `**` for any segments.

A path that servers read in more than one way is refused where a rule looks at paths; it is never put right in
silence, because the server would still get what was sent. What is left is compared with its percent escapes
decoded once: `/a%3Ab` and `/a:b` are one path to every server.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PATH_CHARS_MAX: Final = 8192
SEGMENTS_MAX: Final = 256
STARS_MAX: Final = 16
"""In one pattern."""

_VISIBLE: Final = re.compile(r"[\x21-\x7e]*")
_ESCAPE: Final = re.compile(r"%(..?)?")
_HEX: Final = re.compile(r"[0-9a-fA-F]{2}")
_UNRESERVED: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_STRUCTURE: Final = {"/": "an encoded slash", "\\": "an encoded backslash", "%": "a double encoding"}
_CUTS: Final = frozenset("?#;")
_NOTHING: Final = re.compile(r"(?!)")
_ANYTHING: Final = re.compile(r"(?s:.*)")
"""Before a `**` at the end: `/repos/**` is what is below /repos, not /repos itself."""


class BadPattern(ValueError):
    """A pattern that could not be meant."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern, ready: one expression a segment, None for `**`."""

    text: str
    segments: tuple[re.Pattern[str] | None, ...]

    def matches(self, segments: Sequence[str]) -> bool:
        """In at most len(segments) * len(pattern) steps, whatever the path."""
        return _matches(self.segments, segments)


def check_pattern(text: str) -> None:
    """Raises BadPattern."""
    compiled(text)


def compiled(text: str) -> Pattern:
    if not text.startswith("/"):
        raise BadPattern("a path starts with /")
    if len(text) > PATH_CHARS_MAX or text.count("/") > SEGMENTS_MAX:
        raise BadPattern("it is too long")
    if text.count("*") > STARS_MAX:
        raise BadPattern(f"it has more than {STARS_MAX} stars")
    wrong = refused(text)
    if wrong:
        raise BadPattern(f"it has {wrong}, which no path that is let through has")
    segments = text[1:].split("/")
    if any("**" in segment and segment != "**" for segment in segments):
        raise BadPattern("`**` stands for whole segments: write /a/**, not /a**")
    parts = [None if each == "**" else re.compile(_expression(each)) for each in segments]
    if parts[-1] is None:
        parts.insert(-1, _ANYTHING)
    return Pattern(text, tuple(parts))


def split(path: str) -> tuple[str, ...]:
    """The segments of a path that is not refused, decoded."""
    return tuple(_decoded(each) for each in path[1:].split("/"))


def refused(path: str) -> str | None:
    """Why servers could disagree about this path; None if they cannot."""
    if not path.startswith("/"):
        return "no / at its start"
    if len(path) > PATH_CHARS_MAX or path.count("/") > SEGMENTS_MAX:
        return "too many characters or segments"
    if not _VISIBLE.fullmatch(path):
        return "a blank, a control character or one beyond ASCII"
    if "\\" in path:
        return "a backslash"
    if not _CUTS.isdisjoint(path):
        return "one of ? # ;"
    if "%" in path:
        wrong = _refused_escape(path)
        if wrong:
            return wrong
    segments = path[1:].split("/")
    if "." in segments or ".." in segments:
        return "a dot segment"
    if "" in segments[:-1]:
        return "an empty segment"
    return None


def _refused_escape(path: str) -> str | None:
    for match in _ESCAPE.finditer(path):
        digits = match[1] or ""
        if not _HEX.fullmatch(digits):
            return "a % that is no escape"
        char = chr(int(digits, 16))
        if char in _STRUCTURE:
            return _STRUCTURE[char]
        if char in _CUTS:
            return "an encoded ? # or ;"
        if char < " " or char == "\x7f":
            return "an encoded control character"
        if char in _UNRESERVED:
            return "an encoded letter, digit or dot"
    return None


def _decoded(segment: str) -> str:
    if "%" not in segment:
        return segment
    return re.sub(r"%(..)", lambda match: chr(int(match[1], 16)), segment)


def _expression(segment: str) -> str:
    """Of one segment. Atomic groups: each star takes the first fit for what follows it and is never tried again."""
    first, *rest = [re.escape(_decoded(part)) for part in segment.split("*")]
    if not rest:
        return first
    middle = "".join(f"(?>.*?{part})" for part in rest[:-1] if part)
    return f"(?s:{first}{middle}.*{rest[-1]})"


def _matches(pattern: tuple[re.Pattern[str] | None, ...], segments: Sequence[str]) -> bool:
    """The usual walk with one place to go back to: the last `**`."""
    at = position = 0
    star, taken = -1, 0
    while position < len(segments):
        part = pattern[at] if at < len(pattern) else _NOTHING
        if part is None:
            star, taken = at, position
            at += 1
        elif part.fullmatch(segments[position]):
            at += 1
            position += 1
        elif star >= 0:
            taken += 1
            at, position = star + 1, taken
        else:
            return False
    return all(each is None for each in pattern[at:])


def covers(wide: str, narrow: str) -> bool:
    """Whether every path that `narrow` matches is surely matched by `wide`. False where that is hard to say."""
    if wide == narrow:
        return True
    if "*" not in narrow:
        return compiled(wide).matches(split(narrow))
    stem = wide.removesuffix("**")
    return wide.endswith("/**") and "*" not in stem and narrow.startswith(stem)
