"""JSON that somebody else wrote, read so that it has one meaning and a bounded cost."""

from __future__ import annotations

import json
from typing import Any, Final

from cloche.wire.errors import ClocheError, error
from cloche_server.images.reference import shown

JSON_DEPTH_MAX: Final = 64
JSON_VALUES_MAX: Final = 500_000
JSON_DIGITS_MAX: Final = 20


def refused(reason: str, message: str) -> ClocheError:
    return error("image_refused", message, detail={"reason": reason})


def strict_json(data: bytes, bytes_max: int, what: str) -> dict[str, Any]:
    """A table of bounded size, depth and numbers, with every key once and every text encodable."""
    if len(data) > bytes_max:
        raise refused(f"{what}_too_large", f"The {what} has more than {bytes_max} bytes.")
    if data.count(b",") + data.count(b"[") + data.count(b"{") > JSON_VALUES_MAX:
        raise refused(f"bad_{what}", f"The {what} has more than {JSON_VALUES_MAX} values.")
    try:
        document = json.loads(
            data.decode("utf-8"), object_pairs_hook=_once, parse_int=_small_int, parse_constant=_no_constant
        )
        if not isinstance(document, dict):
            raise ValueError("it is not a table")
        _check_values(document)
    except (ValueError, RecursionError) as raised:
        why = "it is nested too deeply" if isinstance(raised, RecursionError) else shown(str(raised), 120)
        raise refused(f"bad_{what}", f"The {what} is not valid JSON: {why}.") from None
    return document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key is there twice")
    return table


def _small_int(digits: str) -> int:
    if len(digits) > JSON_DIGITS_MAX:
        raise ValueError("a number is too long")
    return int(digits)


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _check_values(document: object) -> None:
    """Depth, and texts without lone surrogates: whoever writes them out again must not fail."""
    level: list[Any] = [document]
    for _ in range(JSON_DEPTH_MAX):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.keys()
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str):
                value.encode()
        if not below:
            return
        level = below
    raise ValueError("it is nested too deeply")
