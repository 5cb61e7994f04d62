"""Work that tells how it goes on, as an iteration of events that can be left.

The work calls back from wherever it is; the reader may be slow. What is cumulative (bytes of a layer) is kept once, what is a
build's output is kept up to a bound and then left out, with a note: memory does not grow with a reader's slowness.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final

from cloche.wire.images import ImageEvent, ImageView

Say = Callable[[ImageEvent], None]
Work = Callable[[Say], Awaitable[Sequence[ImageView]]]

EVENTS_MAX: Final = 1024
OUTPUT_CHARS_MAX: Final = 4 * 1024 * 1024
LEFT_OUT: Final = "\n[output left out: it is not read fast enough]\n"
CUMULATIVE: Final = ("layer", "convert")


class Backlog:
    """What was said and not yet read."""

    def __init__(self) -> None:
        self._events: deque[ImageEvent] = deque()
        self._chars = 0
        self._is_full = False
        self.grew = asyncio.Event()

    def say(self, event: ImageEvent) -> None:
        if event.kind == "done":
            return  # the work's result says it
        self.grew.set()
        if event.kind in CUMULATIVE:
            last = self._events[-1] if self._events else None
            if last is not None and (last.kind, last.digest) == (event.kind, event.digest):
                self._events[-1] = event
                return
            if len(self._events) >= EVENTS_MAX:
                return  # the next one says more
        elif event.kind == "output":
            self._chars += len(event.text or "")
            if self._is_full or self._chars > OUTPUT_CHARS_MAX or len(self._events) >= EVENTS_MAX:
                if self._is_full:
                    return
                self._is_full, event = True, ImageEvent(kind="output", text=LEFT_OUT)
        self._events.append(event)

    def take(self) -> list[ImageEvent]:
        taken = list(self._events)
        self._events.clear()
        self._chars, self._is_full = 0, False
        self.grew.clear()
        return taken


async def told(work: Work) -> AsyncGenerator[ImageEvent, None]:
    """Its events, then one `done` for each image it made. Who leaves the iteration cancels the work."""
    backlog = Backlog()
    task = asyncio.ensure_future(_run(work, backlog))
    try:
        while not task.done():
            await backlog.grew.wait()
            for event in backlog.take():
                yield event
        for event in backlog.take():
            yield event
        for view in task.result():
            name = view.names[0] if view.names else None
            yield ImageEvent(kind="done", image=name, digest=view.digest, view=view)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


async def _run(work: Work, backlog: Backlog) -> Sequence[ImageView]:
    try:
        return await work(backlog.say)
    finally:
        backlog.grew.set()
