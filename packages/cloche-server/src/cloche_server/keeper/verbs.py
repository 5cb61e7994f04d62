"""The closed list of what the daemon can ask for, as pure code from bytes to typed requests or a `Refusal`.

One message is one JSON object of at most 64 KiB: `{"id": n, "verb": "...", ...}`, with descriptors beside it where the
verb takes some. Answers carry the same id and may come in another order.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from cloche_server.engines.spec import ID, BadSpec, SandboxSpec

GENERATION: Final = 1
"""Of this protocol. A keeper and a daemon of different generations refuse each other."""
MESSAGE_BYTES_MAX: Final = 64 * 1024
REQUEST_ID_MAX: Final = (1 << 53) - 1
DESCRIPTORS_MAX: Final = 4
PAGE_MAX: Final = 64
"""Sandboxes in one answer to `list`: an answer is not longer than a request may be."""


class Refusal(Exception):
    """The request was not carried out. `code` is from a short closed list and is stable."""

    def __init__(self, code: str, message: str, request: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.request = request


@dataclass(frozen=True)
class Hello:
    """The first message: which generation of this protocol the daemon speaks."""

    request: int
    generation: int


@dataclass(frozen=True)
class Boot:
    """Make a sandbox, up to a guest that does not run yet."""

    request: int
    spec: SandboxSpec


@dataclass(frozen=True)
class List:
    """What there is, a page at a time."""

    request: int
    after: str
    """The last id of the page before, or empty."""


@dataclass(frozen=True)
class Attach:
    """The descriptors of a living sandbox, again."""

    request: int
    sandbox: str


@dataclass(frozen=True)
class Adopt:
    """Take the daemon's copy of a channel that died with the last keeper."""

    request: int
    sandbox: str


@dataclass(frozen=True)
class Seal:
    """End the engine's helper."""

    request: int
    sandbox: str


@dataclass(frozen=True)
class Kill:
    """End it and remove everything of it."""

    request: int
    sandbox: str


@dataclass(frozen=True)
class Stop:
    """The keeper ends; sandboxes stay."""

    request: int
    purge: bool


Request = Hello | Boot | List | Attach | Adopt | Seal | Kill | Stop

_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "hello": ("generation",),
    "boot": ("spec",),
    "list": ("after",),
    "attach": ("sandbox",),
    "adopt": ("sandbox",),
    "seal": ("sandbox",),
    "kill": ("sandbox",),
    "stop": ("purge",),
}
_ABOUT_ONE: Final[dict[str, type[Attach | Adopt | Seal | Kill]]] = {
    "attach": Attach,
    "adopt": Adopt,
    "seal": Seal,
    "kill": Kill,
}


def parse(data: bytes, descriptors: int = 0) -> Request:
    """Raises `Refusal` for everything that is not exactly one of the verbs, and nothing else."""
    message = _object(data)
    request = message.get("id")
    if type(request) is not int or not 0 <= request <= REQUEST_ID_MAX:
        raise Refusal("malformed", "id: not an integer of a request")
    verb = message.get("verb")
    if not isinstance(verb, str) or verb not in _FIELDS:
        raise Refusal("unknown_verb", f"verb: not one of {', '.join(_FIELDS)}", request)
    if set(message) != {"id", "verb", *_FIELDS[verb]}:
        raise Refusal("malformed", f"{verb}: takes exactly {', '.join(_FIELDS[verb])}", request)
    wanted = 1 if verb == "adopt" else 0
    if descriptors != wanted:
        raise Refusal("wrong_descriptors", f"{verb}: takes {wanted} descriptors, not {descriptors}", request)
    return _request(verb, request, message)


def _request(verb: str, request: int, message: dict[str, Any]) -> Request:
    if verb == "list":
        after = message["after"]
        if not isinstance(after, str) or (after and not ID.fullmatch(after)):
            raise Refusal("malformed", "after: not an id", request)
        return List(request, after)
    if verb == "hello":
        generation = message["generation"]
        if type(generation) is not int or not 0 <= generation <= REQUEST_ID_MAX:
            raise Refusal("malformed", "generation: not an integer", request)
        return Hello(request, generation)
    if verb == "stop":
        if type(message["purge"]) is not bool:
            raise Refusal("malformed", "purge: not true or false", request)
        return Stop(request, message["purge"])
    if verb == "boot":
        try:
            return Boot(request, SandboxSpec.from_object(message["spec"]))
        except BadSpec as error:
            raise Refusal("bad_spec", str(error), request) from None
    sandbox = message["sandbox"]
    if not isinstance(sandbox, str) or not ID.fullmatch(sandbox):
        raise Refusal("malformed", "sandbox: not an id", request)
    return _ABOUT_ONE[verb](request, sandbox)


def _object(data: bytes) -> dict[str, Any]:
    if len(data) > MESSAGE_BYTES_MAX:
        raise Refusal("too_large", f"a message has at most {MESSAGE_BYTES_MAX} bytes")
    try:
        value = json.loads(data, parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError):
        raise Refusal("malformed", "not a JSON object") from None
    if not isinstance(value, dict):
        raise Refusal("malformed", "not a JSON object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name is repeated")
    return value


def answer(request: int, result: dict[str, Any]) -> bytes:
    return json.dumps({"id": request, "ok": result}, separators=(",", ":")).encode()


def refusal(error: Refusal) -> bytes:
    body = {"code": error.code, "message": error.message[:1000]}
    return json.dumps({"id": error.request, "error": body}, separators=(",", ":")).encode()
