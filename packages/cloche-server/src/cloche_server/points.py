"""Named points where a test can stop, fail or kill the process. In production they do nothing.

A crash test replaces `reached` in the process under test; the code only says where it is.
"""

from __future__ import annotations


def reached(point: str) -> None:
    """`point` is `room.thing.moment`, for example `node.command.before_open`."""
