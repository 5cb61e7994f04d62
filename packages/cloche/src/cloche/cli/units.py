"""Sizes and times as people type and read them: `512m`, `1.5g`, `90s`, `1h30m`; MB here is 1024 × 1024 bytes."""

import re
from typing import Any, Final

import click

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_FACTORS: Final = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])", re.IGNORECASE)
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str) -> int:
    """Bytes: a plain number is bytes, as for Docker."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size; write for example 512m or 2g")
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def parse_duration(text: str) -> float:
    """Seconds: a plain number is seconds."""
    text = text.strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    parts = _TIME.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a time; write for example 90s, 5m or 1h30m")
    return sum(float(number) * _SECONDS[unit.lower()] for number, unit in parts)


class _Parsed(click.ParamType[Any]):
    def __init__(self, name: str, parse: Any) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as bad:
            self.fail(str(bad), param, ctx)


SIZE: Final = _Parsed("size", parse_size)
DURATION: Final = _Parsed("time", parse_duration)


def size(count: float) -> str:
    """`41 MB`, `1.5 GB`, `900 B`."""
    for unit, factor in (("TB", 1024**4), ("GB", 1024**3), ("MB", 1024**2), ("KB", 1024)):
        if count >= factor:
            value = count / factor
            return f"{value:.1f} {unit}" if value < 10 and value != int(value) else f"{value:.0f} {unit}"
    return f"{count:.0f} B"


def size_flag(count: int) -> str:
    """A size as it is typed: `512m`, `2g`."""
    for letter, factor in (("g", 1024**3), ("m", 1024**2)):
        if count % factor == 0:
            return f"{count // factor}{letter}"
    return str(count)


def megabytes(count: float) -> str:
    return f"{count / 1024**2:.0f}"


def span(seconds: float | None) -> str:
    """One unit, rounded down: `4m`, `56m`, `2h`, `3d`; `-` when there is none."""
    if seconds is None:
        return "-"
    seconds = max(0.0, seconds)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"


def words(seconds: float) -> str:
    """A limit in words: `5 min`, `90 s`, `24 h`."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length and seconds % length == 0:
            return f"{int(seconds // length)} {unit}"
    return f"{seconds:g} s"


def count(number: int, one: str, many: str | None = None) -> str:
    """`1 sandbox`, `2 sandboxes`."""
    return f"{number} {one if number == 1 else many or one + 'es'}"
