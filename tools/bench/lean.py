"""The leanest HTTP client there is: one unix socket, kept open, bodies counted and not kept.

A figure is about the node, so the client must cost nothing worth naming: no pool, no parser of headers, no decoding
of base64. It knows only what this node sends: a length, or chunks.
"""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

BUFFER_BYTES: Final = 1 << 20
_LENGTH: Final = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE)
EVENTS: Final = "text/event-stream"


class Connection:
    """One request at a time on one connection."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0

    def close(self) -> None:
        self._socket.close()

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """A JSON answer. Anything but a 2xx is a failed measurement."""
        head = self._send(method, path, body, "application/json")
        found = _LENGTH.search(head)
        assert found, head
        text = self._exactly(int(found[1]))
        return json.loads(text) if text else None

    def stream(self, method: str, path: str, body: object = None, *, accept: str = "*/*") -> Iterator[memoryview]:
        """The pieces of a chunked answer, as they come; each is valid until the next."""
        self._send(method, path, body, accept)
        while True:
            size = int(self._until(b"\r\n"), 16)
            left = size
            while left:
                if self._begin == self._end:
                    self._fill()
                piece = self._view[self._begin : min(self._end, self._begin + left)]
                self._begin += len(piece)
                left -= len(piece)
                yield piece
            assert self._until(b"\r\n") == b""
            if not size:
                return

    def _send(self, method: str, path: str, body: object, accept: str) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: cloche\r\naccept: {accept}\r\ncontent-length: {len(content)}\r\n"
        head += "content-type: application/json\r\n" if content else ""
        self._socket.sendall(head.encode() + b"\r\n" + content)
        answer = self._until(b"\r\n\r\n") + b"\r\n"
        assert answer.startswith(b"HTTP/1.1 2"), answer + bytes(self._view[self._begin : self._end])
        return answer

    def _fill(self) -> None:
        """Behind what is unread; at the front when nothing is."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == BUFFER_BYTES:
            rest = bytes(self._view[self._begin : self._end])
            self._view[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        count = self._socket.recv_into(self._view[self._end :])
        assert count, "the node closed the connection"
        self._end += count

    def _until(self, mark: bytes) -> bytes:
        while (at := self._buffer.find(mark, self._begin, self._end)) < 0:
            self._fill()
        found = bytes(self._view[self._begin : at])
        self._begin = at + len(mark)
        return found

    def _exactly(self, size: int) -> bytes:
        collected = b""
        while len(collected) < size:
            if self._begin == self._end:
                self._fill()
            piece = self._view[self._begin : min(self._end, self._begin + size - len(collected))]
            collected += piece
            self._begin += len(piece)
        return collected
