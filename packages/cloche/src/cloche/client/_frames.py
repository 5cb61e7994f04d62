"""The text frames of a WebSocket, read. Pure."""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic import ValidationError

from cloche.wire.commands import Command, Cursor
from cloche.wire.errors import Problem, error, from_problem

EOF: Final = '{"eof": true}'


def read_frame(text: str) -> Cursor | Command | bool | None:
    """A cursor, the ended command, True for end of file, None for what a newer node says. A problem is raised."""
    try:
        document: Any = json.loads(text)
        if "error" in document:
            raise from_problem(Problem.model_validate(document["error"]))
        if "cursor" in document:
            return Cursor.parse(document["cursor"])
        if "end" in document:
            return Command.model_validate(document["end"])
        if "eof" in document:
            return True
    except (ValidationError, ValueError, TypeError, AttributeError, RecursionError) as raised:
        raise error("internal", f"The node sent a frame that can't be read ({type(raised).__name__}).") from raised
    return None
