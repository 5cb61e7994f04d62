"""JSON messages of the guest, checked: what passes has the fields, types and sizes that the contract names."""

from __future__ import annotations

import re

from cloche_server.channel.errors import GUEST_TEXT_CHARS_MAX, OperationFailed, ProtocolError, WrongGeneration
from cloche_server.channel.frames import GENERATION

JsonObject = dict[str, object]

NAME_CHARS_MAX = 64
OPS_MAX = 64
ERROR_CODES = frozenset(
    {
        "not_found",
        "permission_denied",
        "exists",
        "not_a_directory",
        "is_a_directory",
        "not_empty",
        "no_space",
        "read_only",
        "too_large",
        "invalid",
        "name_too_long",
        "loop",
        "busy",
        "refused",
        "unsupported",
        "aborted",
        "no_such_user",
        "not_executable",
        "io",
    }
)
_BOOT = re.compile(r"[0-9a-f]{32}")


def check_text(message: JsonObject, field: str, chars_max: int = NAME_CHARS_MAX) -> str:
    value = message.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= chars_max:
        raise ProtocolError("message", f"{field} is not a text of 1 to {chars_max} characters")
    return value


def check_count(message: JsonObject, field: str, maximum: int) -> int:
    value = message.get(field)
    if type(value) is not int or not 0 <= value <= maximum:
        raise ProtocolError("message", f"{field} is not a whole number from 0 to {maximum}")
    return value


def check_flag(message: JsonObject, field: str) -> bool:
    value = message.get(field)
    if not isinstance(value, bool):
        raise ProtocolError("message", f"{field} is not a boolean")
    return value


def check_hello(message: JsonObject) -> JsonObject:
    """HELLO. The generation is judged first: everything else may look different in another one."""
    generation = check_count(message, "gen", 1_000_000)
    if generation != GENERATION:
        raise WrongGeneration(generation, GENERATION)
    check_text(message, "agent")
    check_text(message, "arch")
    if not _BOOT.fullmatch(check_text(message, "boot")):
        raise ProtocolError("message", "boot is not 32 hexadecimal digits")
    ops = message.get("ops")
    if not isinstance(ops, list) or len(ops) > OPS_MAX:
        raise ProtocolError("message", f"ops is not a list of at most {OPS_MAX}")
    for op in ops:
        if not isinstance(op, str) or len(op) > NAME_CHARS_MAX:
            raise ProtocolError("message", "ops holds something that is no name")
    return message


def check_result(message: JsonObject) -> JsonObject:
    """END: either `{"ok": object}` or `{"error": {"code", "message"}}`; an unknown code is told as `io`."""
    if ("ok" in message) == ("error" in message):
        raise ProtocolError("message", "END has not exactly one of ok and error")
    if "ok" in message:
        if not isinstance(message["ok"], dict):
            raise ProtocolError("message", "ok is not an object")
        return {"ok": message["ok"]}
    error = message["error"]
    if not isinstance(error, dict):
        raise ProtocolError("message", "error is not an object")
    code = check_text(error, "code")
    text = error.get("message", "")
    if not isinstance(text, str):
        raise ProtocolError("message", "error message is not a text")
    return refusal(code if code in ERROR_CODES else "io", text[:GUEST_TEXT_CHARS_MAX])


def refusal(code: str = "refused", message: str = "this sandbox may not open that") -> JsonObject:
    return {"error": {"code": code, "message": message}}


def unwrap(result: JsonObject) -> JsonObject:
    """The `ok` of a checked END, or OperationFailed."""
    ok = result.get("ok")
    if isinstance(ok, dict):
        return ok
    error = result["error"]
    assert isinstance(error, dict)
    raise OperationFailed(str(error["code"]), str(error["message"]))
