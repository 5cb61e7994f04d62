"""The API's description, rendered from the live types and frozen in `protocol/openapi.json`."""

from __future__ import annotations

import json
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from cloche.wire.commands import StartCommand
from cloche.wire.egress import EgressRecords
from cloche.wire.errors import Problem
from cloche.wire.files import WatchEvent
from cloche.wire.images import ImageEvent
from cloche.wire.secrets import SetSecret

VERSION: Final = "1"
DESCRIPTION: Final = """\
Sandboxes with a kernel of their own. `{s}` is a sandbox's id, a unique prefix of it, or its name; `{c}` the same for a
command. Errors are problem+json with a `code` from one table. Besides these routes there are two WebSockets:
`GET /v1/sandboxes/{s}/commands/{c}/terminal` and `GET /v1/sandboxes/{s}/ports/{n}` (docs/http-api.md)."""

_ERROR: Final = {
    "description": "An error.",
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
}


def describe(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title="Cloche", version=VERSION, description=DESCRIPTION, routes=app.routes)
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    _, extra = models_json_schema(
        [
            (StartCommand, "validation"),
            (SetSecret, "validation"),
            *((model, "serialization") for model in (Problem, WatchEvent, ImageEvent, EgressRecords)),
        ],
        ref_template="#/components/schemas/{model}",
    )
    for name, schema in extra["$defs"].items():
        schemas.setdefault(name, schema)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = _ERROR
    return document


def render(app: FastAPI) -> str:
    """As it is frozen: sorted, so that a difference is a difference."""
    return json.dumps(describe(app), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
