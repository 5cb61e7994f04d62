"""Text that a guest chose, before a person sees it."""

from __future__ import annotations


def escaped(text: str, chars_max: int = 500) -> str:
    """Safe for a terminal and a log: no control, escape or bidi character survives."""
    shown = text[:chars_max]
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown)
