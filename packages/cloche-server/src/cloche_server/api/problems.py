"""Every error leaves as problem+json: ours from the table, the framework's translated, anything else `internal`."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cloche.wire.errors import ClocheError, error, to_problem

MEDIA_TYPE: Final = "application/problem+json"
FIELDS_SHOWN_MAX: Final = 8
WS_CLOSE_ERROR: Final = 1011

log = logging.getLogger("cloche.api")


def json_bytes(model: BaseModel) -> bytes:
    """As JSON. A guest's names that are not UTF-8 hold lone surrogates, which only escapes can carry."""
    try:
        return model.model_dump_json(by_alias=True).encode()
    except PydanticSerializationError:
        return json.dumps(model.model_dump(by_alias=True), default=str).encode()


def problem_json(err: ClocheError) -> bytes:
    return json_bytes(to_problem(err))


def problem_head(err: ClocheError, length: int) -> list[tuple[bytes, bytes]]:
    headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", b"%d" % length)]
    if err.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(err.retry_after_s))))
    if err.kind.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if err.kind.status == 405 and "allow" in err.detail:
        headers.append((b"allow", str(err.detail["allow"]).encode("latin-1")))
    return headers


def invalid_fields(raised: ValidationError | RequestValidationError) -> ClocheError:
    """One sentence naming the fields; what the client sent is not echoed."""
    fields = []
    for item in raised.errors()[:FIELDS_SHOWN_MAX]:
        where = ".".join(str(part) for part in item["loc"] if part not in ("body", "query", "path"))
        fields.append({"field": where, "message": str(item["msg"])})
    sentence = "; ".join(f"{one['field'] or 'the body'}: {one['message']}" for one in fields)
    return error("invalid_request", f"The request is not valid: {sentence}.", detail={"fields": fields})


def from_http(raised: HTTPException) -> ClocheError:
    if isinstance(raised.__cause__, ClocheError):  # ours, raised while the framework read the body
        return raised.__cause__
    if raised.status_code == 404:
        return error("not_found", "There is no such route.", fix="See the routes: GET /openapi.json")
    if raised.status_code == 405:
        allow = (raised.headers or {}).get("Allow", "")
        return error("method_not_allowed", "This route does not have that method.", detail={"allow": allow})
    return error("invalid_request", f"The request was refused: {raised.detail}.")


def translate(raised: Exception) -> ClocheError:
    if isinstance(raised, ClocheError):
        return raised
    if isinstance(raised, RequestValidationError):
        return invalid_fields(raised)
    if isinstance(raised, HTTPException):
        return from_http(raised)
    log.error("a request failed in a way nobody foresaw", exc_info=raised)
    return error("internal", "The node failed to answer.")


class Boundary:
    """Around everything: what is raised below becomes an answer, or an end of the connection if one was begun."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noting_send(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, noting_send)
        except asyncio.CancelledError:
            return  # the server is stopping; uvicorn closes the connection, the client resumes
        except Exception as raised:  # whatever it is, the caller gets a problem and the log the trace
            err = translate(raised)
            if scope["type"] == "websocket":
                await _end_websocket(err, begun, send)
            elif not begun:
                await send_problem(err, send)


def whole_answer(err: ClocheError) -> bytes:
    """As bytes on the line, for what goes wrong before there is a request; the connection is closed after it."""
    body = problem_json(err)
    lines = [b"HTTP/1.1 %d %b" % (err.kind.status, err.code.encode())]
    lines += [name + b": " + value for name, value in problem_head(err, len(body))]
    return b"\r\n".join([*lines, b"connection: close", b"", body])


async def send_problem(err: ClocheError, send: Send) -> None:
    body = problem_json(err)
    head = problem_head(err, len(body))
    await send({"type": "http.response.start", "status": err.kind.status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def _end_websocket(err: ClocheError, begun: bool, send: Send) -> None:
    """Before the handshake: a plain HTTP answer. After it: the problem as text, then the close."""
    body = problem_json(err)
    messages: list[dict[str, Any]]
    if begun:
        text = f'{{"error": {body.decode()}}}'
        messages = [
            {"type": "websocket.send", "text": text},
            {"type": "websocket.close", "code": WS_CLOSE_ERROR, "reason": err.code},
        ]
    else:
        head = problem_head(err, len(body))
        messages = [
            {"type": "websocket.http.response.start", "status": err.kind.status, "headers": head},
            {"type": "websocket.http.response.body", "body": body},
        ]
    try:
        for message in messages:
            await send(message)
    except (OSError, RuntimeError):
        return  # the other end left first
