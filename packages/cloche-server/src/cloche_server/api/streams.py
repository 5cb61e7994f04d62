"""Answers that go on: raw bytes and server-sent events, straight to the connection, with its own pace.

A stream pulls from its source only when the connection has room; it notices a reader who leaves, also while there
is nothing to say; and an event stream says so every 15 seconds that it is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Final

from pybase64 import b64encode
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cloche.wire.errors import ClocheError
from cloche_server.api.backend import OutputChunk
from cloche_server.api.gathering import WAIT_S
from cloche_server.api.problems import json_bytes, problem_json, translate

HEARTBEAT_S: Final = 15.0
HEARTBEAT: Final = b": alive\n\n"
EVENT_BYTES_MAX: Final = 256 * 1024
"""The most bytes of output in one event, before base64."""
TURN_BYTES: Final = 1024 * 1024
"""After so many bytes a stream lets others have a turn, even if it never has to wait."""
FIRST_WAIT_S: Final = 0.05
"""How long an endless stream waits for its first piece: an error in that time is a status, later an event."""
ATTEND_AFTER_S: Final = 0.05
"""Only then, or after `TURN_BYTES`, is a reader who leaves looked for: most commands are over by then."""

Piece = bytes | memoryview

log = logging.getLogger("cloche.api")

_NAMES: Final = {1: b"stdout", 2: b"stderr"}


def output_events(chunk: OutputChunk) -> bytes:
    """The chunk as events; each id is the cursor after its bytes."""
    data = chunk.data
    size = len(data)
    name = _NAMES[chunk.fd]
    if size <= EVENT_BYTES_MAX:
        head = b"id: %d.%d\nevent: %b\ndata: " % (chunk.generation, chunk.offset + size, name)
        return b"".join((head, b64encode(data), b"\n\n"))
    view = memoryview(data)
    parts: list[bytes] = []
    for start in range(0, size, EVENT_BYTES_MAX):
        piece = view[start : start + EVENT_BYTES_MAX]
        parts.append(b"id: %d.%d\nevent: %b\ndata: " % (chunk.generation, chunk.offset + start + len(piece), name))
        parts.append(b64encode(piece))
        parts.append(b"\n\n")
    return b"".join(parts)


def model_event(name: str, model: BaseModel) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json_bytes(model))


class Stream(Response):
    """Sends what `source` yields. `patient`: the source may be silent for long, so begin the answer without it.

    `first_waits_s`: nobody needs the first piece alone; it may wait so long for one to go with.
    `after` is set when the source has read the request's body: until then the connection is its own.
    """

    def __init__(
        self,
        source: AsyncGenerator[Piece, None],
        media_type: str,
        *,
        headers: dict[str, str] | None = None,
        patient: bool = False,
        first_waits_s: float | None = None,
        after: asyncio.Event | None = None,
    ) -> None:
        self.source = source
        self.patient = patient
        self.first_waits_s = first_waits_s
        self.after = after
        self.is_events = media_type == "text/event-stream"
        self.background = None
        self.status_code = 200
        head = {"content-type": media_type, "cache-control": "no-store", **(headers or {})}
        self.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.items()]
        self._spoke = True
        self._gone = False
        self._attending: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self.source):
                first = await self._first()
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._run(first, receive, send)
        except asyncio.CancelledError:
            if not self._gone:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()

    async def _first(self) -> asyncio.Task[Piece | None] | Piece | None:
        """The first piece, None at an empty source's end, or the task that still waits for it."""
        if not self.patient:
            return await anext(self.source, None)
        task = asyncio.ensure_future(_next(self.source))
        try:
            await self._wait_for_body(task)
            done, _ = await asyncio.wait({task}, timeout=FIRST_WAIT_S)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        return task.result() if done else task

    async def _wait_for_body(self, task: asyncio.Task[Piece | None]) -> None:
        if self.after is None:
            return
        read = asyncio.ensure_future(self.after.wait())
        try:
            await asyncio.wait({task, read}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            read.cancel()

    async def _run(self, first: asyncio.Task[Piece | None] | Piece | None, receive: Receive, send: Send) -> None:
        pump = asyncio.current_task()
        assert pump is not None

        def attend() -> None:
            if self._attending is None:
                self._attending = asyncio.ensure_future(self._attend(pump, receive, send))

        begin = asyncio.get_running_loop().call_later(ATTEND_AFTER_S, attend)
        last = b""
        try:
            piece = await first if isinstance(first, asyncio.Task) else first
            await self._pump(piece, send, attend)
        except Exception as raised:  # half the answer is sent: its end must say that it broke
            err = translate(raised)
            if not self.is_events:
                log.info("a stream broke: %s", err.code)
                return  # without the last chunk: the client sees that it is not whole
            last = _error_event(err)
        finally:
            begin.cancel()
            if self._attending is not None:
                self._attending.cancel()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _pump(self, piece: Piece | None, send: Send, attend: Callable[[], None]) -> None:
        since_turn = 0
        source = self.source
        if piece is not None and self.first_waits_s is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True, WAIT_S: self.first_waits_s})
            piece = await anext(source, None)
        while piece is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._spoke = True
            since_turn += len(piece)
            if since_turn >= TURN_BYTES:
                since_turn = 0
                attend()  # what is sent to nobody meets no resistance
                await asyncio.sleep(0)
            piece = await anext(source, None)

    async def _attend(self, pump: asyncio.Task[object], receive: Receive, send: Send) -> None:
        """Beats while the source is silent; ends the pump when the reader has left."""
        beat = HEARTBEAT_S if self.is_events else None
        while True:
            try:
                async with asyncio.timeout(beat):
                    while (await receive())["type"] != "http.disconnect":
                        pass
                self._gone = True
                pump.cancel()
                return
            except TimeoutError:
                if not self._spoke:
                    await send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
                self._spoke = False


async def _next(source: AsyncIterator[Piece]) -> Piece | None:
    return await anext(source, None)


def _error_event(err: ClocheError) -> bytes:
    return b"event: error\ndata: " + problem_json(err) + b"\n\n"
