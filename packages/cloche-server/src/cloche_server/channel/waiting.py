"""What a guest's stream sends before somebody has answered its OPEN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloche_server.channel.messages import JsonObject

if TYPE_CHECKING:
    from cloche_server.channel.streams import Sink


class Waiting:
    """The sink of a guest's stream until the owner answers: keeps at most the first window."""

    def __init__(self) -> None:
        self.owner: Sink | None = None
        self._data = bytearray()
        self._eof: int | None = None

    def replay(self, sink: Sink) -> None:
        if self._data:
            sink.data(memoryview(bytes(self._data)))
        if self._eof is not None:
            sink.eof(self._eof)

    def opened(self, info: JsonObject) -> None: ...

    def data(self, view: memoryview) -> None:
        self._data += view

    def eof(self, offset: int) -> None:
        self._eof = offset

    def end(self, result: JsonObject) -> None: ...

    def credit(self, consumed: int, limit: int) -> None: ...

    def lost(self, reason: str) -> None:
        if self.owner is not None:
            self.owner.lost(reason)
