"""Text that a guest chose, made harmless to look at (security invariant 1).

A terminal acts on what it shows: escape sequences move the cursor and set the clipboard (OSC 52), bidirectional
marks reorder a line, invisible characters hide. Here every such character becomes visible: controls as `\\x1b`,
format and invisible characters as `⟦U+202E⟧`. Letters, digits, emoji and ordinary accents stay as they are.
"""

import codecs
import unicodedata
from typing import Final

MARKS_IN_A_ROW_MAX: Final = 4
"""Combining marks on one letter; real languages need fewer, "zalgo" text climbs over other lines with more."""

_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_INVISIBLE: Final = frozenset("\u115f\u1160\u3164\uffa0\u2800\u034f\u17b4\u17b5")
_SHOWN_CATEGORIES: Final = frozenset({"Cf", "Co", "Cn", "Zl", "Zp"})
_WIDE_SPACE: Final = "\u3000"


def escape(text: str, *, keep: str = "") -> str:
    """`text` with every control, format and invisible character made visible, but for those in `keep`."""
    if text.isascii() and text.isprintable():
        return text
    shown: list[str] = []
    marks = 0
    for char in text:
        category = unicodedata.category(char)
        marks = marks + 1 if category.startswith("M") else 0
        plain = char in keep or (marks <= MARKS_IN_A_ROW_MAX and not _is_dangerous(char, category))
        shown.append(char if plain else _visible(char))
    return "".join(shown)


def line(text: str, width_max: int = 80) -> str:
    """One escaped line of at most `width_max` characters; what was cut off shows as `…`."""
    head = escape(text[: width_max + 1])
    return head if len(head) <= width_max else head[: width_max - 1] + "…"


def _is_dangerous(char: str, category: str) -> bool:
    code = ord(char)
    return (
        code < 0x20
        or 0x7F <= code <= 0x9F
        or 0xD800 <= code <= 0xDFFF
        or category in _SHOWN_CATEGORIES
        or char in _INVISIBLE
        or 0xFE00 <= code <= 0xFE0E  # variation selectors carry hidden bytes; FE0F (emoji form) is ordinary
        or 0xE0100 <= code <= 0xE01EF
        or (category == "Zs" and char not in (" ", _WIDE_SPACE))
    )


def _visible(char: str) -> str:
    code = ord(char)
    if char in _NAMED:
        return _NAMED[char]
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8, as Python carries it in file names
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"⟦U+{code:04X}⟧"


class StreamEscaper:
    """The same for output that comes in pieces: lines and tabs stay, everything else is made visible."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._held = ""

    def feed(self, data: bytes, *, final: bool = False) -> str:
        text = self._held + self._decoder.decode(data, final)
        self._held = ""
        if text.endswith("\r") and not final:  # half of a "\r\n", perhaps
            text, self._held = text[:-1], "\r"
        return escape(text.replace("\r\n", "\n"), keep="\n\t")
