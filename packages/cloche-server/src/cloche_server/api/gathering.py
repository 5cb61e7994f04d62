"""An answer in few writes: each one wakes its reader, who then takes a core from the guest he waits for.

uvicorn writes the head, every piece and the last chunk on its own. Here what one turn of the loop says goes out at the
end of that turn, the end of an answer at once with all before it, and bulk beside the frame of its chunk, not copied.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

BULK_BYTES_MIN: Final = 16 * 1024
HELD_BYTES_MAX: Final = 64 * 1024
WAIT_S: Final = "cloche.wait_s"
"""In a message: how long its piece may wait for the next one, to go with it."""


class Gathered(asyncio.Transport):
    """What a cycle writes to. Holds it until the loop's next turn, or as long as the last piece said."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._held = bytearray()
        self._flushing: asyncio.Handle | None = None
        self._waits = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._held += data
        if len(self._held) > HELD_BYTES_MAX:
            self.flush()
        elif self._flushing is None or self._waits:
            self._cancel()
            self._flushing = asyncio.get_running_loop().call_soon(self.flush)

    def wait(self, seconds: float) -> None:
        """What is held may wait so long; the next write ends that."""
        if self._held:
            self._cancel()
            self._flushing = asyncio.get_running_loop().call_later(seconds, self.flush)
            self._waits = True

    def flush(self) -> None:
        self._cancel()
        if self._held:
            held, self._held = self._held, bytearray()
            self._transport.write(held)

    def write_bulk(self, frame: bytes, body: bytes | memoryview, after: bytes) -> None:
        self.flush()
        self._transport.writelines((frame, body, after))

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _cancel(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
            self._waits = False


class GatheringCycle(RequestResponseCycle):
    """Never constructed: a cycle that uvicorn has just made becomes one."""

    transport: Gathered

    @classmethod
    def adopt(cls, cycle: RequestResponseCycle) -> None:
        cycle.__class__ = cls
        cycle.transport = Gathered(cycle.transport)

    async def send(self, message: Any) -> None:
        body: bytes | memoryview = message.get("body", b"")
        if len(body) < BULK_BYTES_MIN or not (self.chunked_encoding and message.get("more_body")):
            await super().send(message)
            if self.response_complete:
                self.transport.flush()
            elif WAIT_S in message:
                self.transport.wait(message[WAIT_S])
            return
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if not self.disconnected:
            self.transport.write_bulk(b"%x\r\n" % len(body), body, b"\r\n")
