"""What a person sees: tables, ticks, JSON. Plain without a terminal; `NO_COLOR` is honoured.

Whatever a guest or another user chose is escaped here, in `table` and `tick`, so that no verb can forget it.
"""

import json
import os
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import IO, Any, Final

from cloche.cli.escape import line

CELL_WIDTH_MAX: Final = 48
LAST_WIDTH_MAX: Final = 240
"""The last column may be longer: nothing stands to its right."""


def is_terminal(stream: IO[Any]) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def has_colour(stream: IO[Any]) -> bool:
    return is_terminal(stream) and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def styled(text: str, code: str, stream: IO[Any]) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if has_colour(stream) else text


def sign(char: str, otherwise: str, stream: IO[Any]) -> str:
    """`char` if the stream can carry it, else plain ASCII."""
    try:
        char.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return otherwise
    return char


def say(text: str) -> None:
    """A line on stderr."""
    print(text, file=sys.stderr, flush=True)


def shown(text: str) -> str:
    """A name or a sentence that somebody else chose, as a part of a line."""
    return line(text, LAST_WIDTH_MAX)


def tick(text: str) -> None:
    """`✓ text` on stderr: something was done that took a moment or leaves state."""
    say(f"{styled(sign('✓', '+', sys.stderr), '32', sys.stderr)} {line(text, 400)}")


def width(text: str) -> int:
    """Columns that `text` takes in a terminal."""
    if text.isascii():
        return len(text)
    wide = sum(1 for char in text if unicodedata.east_asian_width(char) in "WF")
    marks = sum(1 for char in text if unicodedata.combining(char))
    return len(text) + wide - marks


def table_lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Aligned columns, two spaces apart, every cell escaped; no trailing blanks."""
    limits = [CELL_WIDTH_MAX] * (len(head) - 1) + [LAST_WIDTH_MAX]
    grid = [tuple(head)] + [tuple(map(line, row, limits)) for row in rows]
    widths = [max(width(row[column]) for row in grid) for column in range(len(head))]
    return [
        "  ".join(cell + " " * (wide - width(cell)) for cell, wide in zip(row, widths, strict=True)).rstrip()
        for row in grid
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = table_lines(head, rows)
    print(styled(lines[0], "1", sys.stdout))
    for text in lines[1:]:
        print(text)


def json_out(value: Any) -> None:
    """JSON on stdout. `ensure_ascii` keeps what a guest chose from reaching a terminal raw."""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json", by_alias=True)
    elif isinstance(value, list):
        value = [item.model_dump(mode="json", by_alias=True) if hasattr(item, "model_dump") else item for item in value]
    print(json.dumps(value, indent=2, ensure_ascii=True))
