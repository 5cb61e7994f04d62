"""How a build says what is wrong: always with the line, and never with a raw character that a file or a guest chose."""

from __future__ import annotations

from typing import Any

from cloche.wire.errors import ClocheError, error
from cloche_server.images.reference import shown

__all__ = ["failed", "invalid", "shown", "unsupported"]


def invalid(line: int, what: str) -> ClocheError:
    return error("dockerfile_invalid", f"line {line}: {what}", detail={"line": line})


def unsupported(line: int, name: str, why: str = "") -> ClocheError:
    """`name` is the instruction or option, as its author knows it."""
    text = f"line {line}: {name} is not supported"
    return error(
        "dockerfile_unsupported", f"{text}: {why}" if why else f"{text}.", detail={"line": line, "instruction": name}
    )


def failed(line: int, instruction: str, what: str, **detail: Any) -> ClocheError:
    return error(
        "build_failed",
        f"line {line}: {shown(instruction, 120)}: {what}",
        detail={"line": line, "instruction": shown(instruction), **detail},
    )
