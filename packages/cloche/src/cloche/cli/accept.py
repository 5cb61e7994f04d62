"""`--accept`: what an operator takes weaker, by name."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

ACCEPTABLE: Final = ("single-uid", "no-cgroup")


def _split(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for text in value for name in text.split(",") if name.strip())
    for name in names:
        if name not in ACCEPTABLE:
            raise click.UsageError(f"--accept {name}: can be one of {', '.join(ACCEPTABLE)}")
    return names


def accept_option(function: F) -> F:
    text = f"Start although this is missing: {', '.join(ACCEPTABLE)}. Shows in every sandbox's isolation report."
    return click.option("--accept", multiple=True, metavar="WHAT", callback=_split, help=text)(function)
