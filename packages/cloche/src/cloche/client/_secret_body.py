"""A secret on its way to the node: the one place of the SDK where a value becomes bytes. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError

from cloche.client._credentials import may_carry
from cloche.client._requests import invalid
from cloche.client._target import Target
from cloche.wire.errors import error
from cloche.wire.secrets import Place, SetSecret


def secret_body(
    value: str | None,
    source: Mapping[str, Any] | None,
    *,
    hosts: Sequence[str],
    places: Sequence[Place | Mapping[str, Any]],
    methods: Sequence[str] | None,
    paths: Sequence[str] | None,
    require: bool,
) -> bytes:
    """Checked here first, with a value that is masked, so that no error can hold it."""
    if (value is None) == (source is None):
        raise error("invalid_request", "Give either a value, or a source that the node asks.")
    fields: dict[str, Any] = {
        "source": {"kind": "value", "value": "masked"} if source is None else dict(source),
        "hosts": list(hosts),
        "places": [place.model_dump() if isinstance(place, Place) else dict(place) for place in places],
        "methods": None if methods is None else list(methods),
        "paths": None if paths is None else list(paths),
        "require": require,
    }
    try:
        SetSecret.model_validate(fields)
    except ValidationError as raised:
        raise invalid(raised) from None
    if value is not None:
        fields["source"] = {"kind": "value", "value": value}
    return json.dumps(fields).encode()


def check_line(target: Target) -> None:
    """A value never goes over a network in the clear."""
    if not may_carry(target):
        raise error(
            "invalid_request",
            f"A secret is not sent in the clear to {target.url}.",
            fix="Use an https:// address of the node (CLOCHE_URL), or set it on the node's own machine.",
        )


def name_part(name: str) -> str:
    """A name as a part of a path."""
    return quote(name, safe="")
