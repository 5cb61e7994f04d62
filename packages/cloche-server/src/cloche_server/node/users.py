"""The one user that nobody inside may be: the guest agent's own. By number here; by an image's name for it, in the agent."""

from __future__ import annotations

from typing import Final

from cloche.wire.errors import error

AGENT_ID: Final = "64000"


def check_user(user: str | None) -> None:
    """`UID`, `UID:GID`, `NAME:GID`: a name is the image's, and is not judged here."""
    if user is not None and any(part.lstrip("0") == AGENT_ID for part in user.split(":")):
        raise error("no_such_user", f"Uid and gid {AGENT_ID} are the guest agent's own; nothing runs as it.")
