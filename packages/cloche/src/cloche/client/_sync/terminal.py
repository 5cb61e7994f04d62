# Made by tools/unasync.py from packages/cloche/src/cloche/client/_async/terminal.py: edit that one.
"""A terminal inside, over a WebSocket: bytes both ways, its size, and its end."""

from __future__ import annotations

import json
from types import TracebackType
from typing import TYPE_CHECKING

from cloche.client._failures import translate
from cloche.client._frames import read_frame
from cloche.client._sync.transport import Transport
from cloche.wire.commands import Command as CommandView
from cloche.wire.commands import Cursor
from cloche.wire.ends import End

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection


class Terminal:
    """What `attach()` gives. `receive()` gives screen bytes until the command's end; then `ended` is set."""

    def __init__(self, transport: Transport, socket: ClientConnection) -> None:
        self._transport = transport
        self._socket = socket
        self.cursor: Cursor | None = None
        """Where the screen stands: with it, `attach(from_=…)` goes on from here."""
        self.view: CommandView | None = None

    @property
    def ended(self) -> End | None:
        return self.view.ended if self.view else None

    def receive(self) -> bytes:
        """The next bytes for the screen; b"" at the end. A lost connection raises: attach again from `cursor`."""
        from websockets.exceptions import WebSocketException

        while self.view is None:
            try:
                message = self._socket.recv()
            except (WebSocketException, OSError) as raised:
                raise translate(raised, self._transport.target) from raised
            if isinstance(message, bytes):
                if self.cursor is not None:
                    self.cursor = Cursor(generation=self.cursor.generation, offset=self.cursor.offset + len(message))
                return message
            frame = read_frame(message)
            if isinstance(frame, Cursor):
                self.cursor = frame
            elif isinstance(frame, CommandView):
                self.view = frame
        return b""

    def send(self, data: bytes) -> None:
        """Keys. Safe to call while another thread waits in `receive`."""
        self._send(data)

    def resize(self, rows: int, cols: int) -> None:
        self._send(json.dumps({"resize": {"rows": rows, "cols": cols}}))

    def _send(self, message: str | bytes) -> None:
        from websockets.exceptions import WebSocketException

        try:
            self._socket.send(message)
        except (WebSocketException, OSError) as raised:
            raise translate(raised, self._transport.target) from raised

    def close(self) -> None:
        """Leaves; the command goes on."""
        self._socket.close()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = self.ended.reason.value if self.ended else "attached"
        return f"<{type(self).__name__} {state} cursor={self.cursor}>"
