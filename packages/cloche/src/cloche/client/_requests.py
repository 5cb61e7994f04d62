"""From a caller's words to a request's: commands, signals, offsets. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from cloche.wire.commands import OnFull, StartCommand, Terminal
from cloche.wire.errors import ClocheError, error

FIELDS_SHOWN_MAX: Final = 8
SHELL: Final = "/bin/sh"

_Model = TypeVar("_Model", bound=BaseModel)


def argv_of(command: str | list[str]) -> list[str]:
    """Text is a shell's line; a list is a program and its arguments, taken as they are."""
    if isinstance(command, str):
        return [SHELL, "-c", command]
    return list(command)


def start_request(
    command: str | list[str],
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    user: str | None,
    timeout_s: float | None,
    stdin: bool,
    terminal: Terminal | None,
    merge_stderr: bool,
    output_bytes_max: int,
    on_full: OnFull,
) -> bytes:
    fields: dict[str, Any] = {"argv": argv_of(command), "output_bytes_max": output_bytes_max, "on_full": on_full}
    fields |= {"stdin": stdin, "merge_stderr": merge_stderr}
    optional = {
        "cwd": cwd,
        "env": dict(env) if env else None,
        "user": user,
        "timeout_s": timeout_s,
        "terminal": terminal,
    }
    fields |= {name: value for name, value in optional.items() if value is not None}
    try:
        return StartCommand.model_validate(fields).model_dump_json(exclude_unset=True).encode()
    except ValidationError as raised:
        raise invalid(raised) from None


def invalid(raised: ValidationError) -> ClocheError:
    """A caller's mistake, found before anything was sent."""
    found = [
        f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in raised.errors()[:FIELDS_SHOWN_MAX]
    ]
    return error("invalid_request", f"{'; '.join(found)}.")


def bytes_of(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else bytes(data)


def request_body(model: type[BaseModel], **fields: Any) -> bytes:
    """A request as JSON, checked here first. Names of files that are not UTF-8 travel as lone surrogates."""
    try:
        made = model(**fields)
    except ValidationError as raised:
        raise invalid(raised) from None
    try:
        return made.model_dump_json(by_alias=True).encode()
    except PydanticSerializationError:
        return json.dumps(made.model_dump(by_alias=True)).encode()


def read_model(model: type[_Model], body: bytes) -> _Model:
    try:
        return model.model_validate_json(body)
    except ValidationError:
        pass
    try:
        return model.model_validate(json.loads(body))  # takes lone surrogates
    except (ValidationError, ValueError, RecursionError):
        raise error("internal", f"The node's answer is not a {model.__name__}.") from None
