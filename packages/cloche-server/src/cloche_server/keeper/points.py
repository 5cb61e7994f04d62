"""Named points where a test can stop, fail or kill the keeper. In production they do nothing.

A crash test starts the keeper by a program of its own that replaces `reached`; the code only says where it is.
"""

from __future__ import annotations


def reached(point: str) -> None:
    """`point` is `keeper.boot.<step>`, `keeper.undo.<step>` or another moment named where it is passed."""
