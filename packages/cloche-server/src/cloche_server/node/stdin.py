"""A command's stdin by offset: what the guest holds is skipped, a gap is refused, writers take turns.

End of file is journalled once everything before it is confirmed and before it is sent, so a daemon that dies in between
sends it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from cloche.wire.commands import StdinState
from cloche.wire.errors import ClocheError, error
from cloche_server.channel import ChannelLost, Stream, StreamEnded, StreamState
from cloche_server.node.context import Context, from_channel
from cloche_server.node.records import CommandRecord, SandboxRecord

PIECE_BYTES_MAX: Final = 262_144


class Stdin:
    """One command's stdin."""

    def __init__(self, context: Context, sandbox: SandboxRecord, record: CommandRecord) -> None:
        self.closed = False
        self._context = context
        self._sandbox = sandbox
        self._record = record
        self._next = 0
        """The offset of the next byte that goes to the channel; what is below is confirmed or on its way."""
        self._lock = asyncio.Lock()
        self._stream: Stream | None = None
        self._changed = asyncio.Event()
        self._over = False

    @property
    def offset(self) -> int:
        """How many bytes the guest has confirmed."""
        return self._record.stdin_offset if self._stream is None else self._stream.confirmed

    def attach(self, stream: Stream) -> None:
        self._stream = stream

    def adopted(self, state: StreamState) -> None:
        """After a re-attach: on from what the guest holds, and end of file again if it was promised."""
        self._next = state.received
        if self.closed and not state.eof_received and self._stream is not None:
            self._stream.eof()
        self.closed = self.closed or state.eof_received

    def changed(self) -> None:
        self._changed.set()

    def over(self) -> None:
        self._over = True
        self._changed.set()

    async def write(self, offset: int, data: AsyncIterator[bytes], *, eof: bool) -> StdinState:
        if not self._record.request["stdin"] and self._record.request["terminal"] is None:
            raise error("no_stdin", "The command was started without stdin.")
        async with self._lock:
            if offset > self._next:
                raise self._wrong_offset(offset)
            try:
                async for piece in data:
                    offset = await self._send(offset, piece)
                await self._confirmed(min(offset, self._next))
                if eof and offset == self._next:
                    self._close()
            except StreamEnded:
                raise self._ended() from None
            except ChannelLost as lost:
                raise from_channel(lost) from lost
            return StdinState(offset=self.offset, closed=self.closed)

    async def _send(self, offset: int, piece: bytes) -> int:
        """Sends what of `piece` is new; the offset after it."""
        stream = self._open_stream()
        view = memoryview(piece)[max(0, self._next - offset) :]
        if len(view) and self.closed:
            raise error("stdin_closed", "The command's stdin was closed.", detail={"offset": self._next})
        for at in range(0, len(view), PIECE_BYTES_MAX):
            part = view[at : at + PIECE_BYTES_MAX]
            await stream.writable()
            stream.send(part)
            self._next += len(part)
        return offset + len(piece)

    async def _confirmed(self, target: int) -> None:
        stream = self._open_stream()
        while stream.confirmed < target:
            if self._over:
                raise StreamEnded
            self._changed.clear()
            await stream.writable()
            if stream.confirmed < target:
                await self._changed.wait()
        return

    def _close(self) -> None:
        if not self.closed:
            stream, who = self._open_stream(), self._sandbox
            self._context.journal.write(
                "command.stdin_closed",
                sandbox=who.id,
                command=self._record.id,
                owner=who.owner,
                tenant=who.tenant,
                detail={"offset": self._next},
            )
            self.closed = True
            stream.eof()

    def _open_stream(self) -> Stream:
        if self._over or self._stream is None:
            raise StreamEnded
        return self._stream

    def _wrong_offset(self, offset: int) -> ClocheError:
        message = f"Bytes from {offset} would leave a gap; the next byte is {self._next}."
        return error("stdin_offset", message, detail={"offset": self._next, "confirmed": self.offset})

    def _ended(self) -> ClocheError:
        return error(
            "command_ended", "The command ended before it read everything.", detail={"stdin_offset": self.offset}
        )
