"""Frames waiting to be written: small ones joined, large payloads by reference, taken as iovecs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cloche_server.channel.frames import FRAME_BYTES_MAX, encode, encode_around

COPY_BYTES_MAX = 4096
JOINED_BYTES_MAX = 65_536
IOVECS_MAX = 512  # Linux takes 1,024


class Outbox:
    """`wake` is called when the first byte is put into an empty box; `wake_later` when nobody waits for that byte."""

    __slots__ = ("_only_later", "_parts", "_wake", "_wake_later", "bytes", "bytes_total", "frames_total")

    def __init__(self, wake: Callable[[], None], wake_later: Callable[[], None] | None = None) -> None:
        self._parts: deque[bytes | bytearray | memoryview] = deque()
        self._wake = wake
        self._wake_later = wake_later or wake
        self._only_later = False
        self.bytes = 0
        self.bytes_total = 0
        self.frames_total = 0

    def put(self, kind: int, stream: int, payload: bytes | memoryview = b"") -> None:
        self.frames_total += 1
        if len(payload) <= COPY_BYTES_MAX:
            self.put_raw(encode(kind, stream, bytes(payload)))
        else:
            header, trailer = encode_around(kind, stream, payload)
            self.put_raw(header)
            self._parts.append(payload)
            self.bytes += len(payload)
            self.bytes_total += len(payload)
            self.put_raw(trailer)

    def put_later(self, kind: int, stream: int) -> None:
        """It goes with the next frame, or after a moment: waking the guest now would take time from whoever waits for us."""
        self.frames_total += 1
        empty = not self.bytes
        self._append(encode(kind, stream, b""))
        if empty:
            self._only_later = True
            self._wake_later()

    def put_raw(self, data: bytes) -> None:
        first = not self.bytes or self._only_later
        self._append(data)
        if first:
            self._only_later = False
            self._wake()

    def _append(self, data: bytes) -> None:
        last = self._parts[-1] if self._parts else None
        if type(last) is bytearray and len(last) + len(data) <= JOINED_BYTES_MAX:
            last += data
        else:
            self._parts.append(bytearray(data))
        self.bytes += len(data)
        self.bytes_total += len(data)

    def iovecs(self, bytes_max: int) -> list[bytes | bytearray | memoryview]:
        """The next parts to write: about `bytes_max`, never less than one part."""
        taken: list[bytes | bytearray | memoryview] = []
        count = 0
        for part in self._parts:
            taken.append(part)
            count += len(part)
            if count >= bytes_max or len(taken) >= IOVECS_MAX:
                break
        return taken

    def written(self, count: int) -> None:
        parts = self._parts
        self.bytes -= count
        while count:
            part = parts.popleft()
            if len(part) > count:
                parts.appendleft(
                    memoryview(bytes(part))[count:] if type(part) is bytearray else memoryview(part)[count:]
                )
                return
            count -= len(part)

    def clear(self) -> None:
        self._parts.clear()
        self.bytes = 0


assert COPY_BYTES_MAX < JOINED_BYTES_MAX < FRAME_BYTES_MAX
