"""The control channel to one interceptor: framing, descriptors, bounds. Callbacks of the loop, no task.

What waits to be sent is bounded: a process that does not read is given up. A descriptor goes with the first byte of its
message. None is taken from the process: what it sends is received without them, and the kernel closes them.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from cloche_server.egress.interception.messages import Frames, Lie, Message, told

READ_BYTES: Final = 16 * 1024
"""At once: the loop is for others too."""
WAITING_BYTES_MAX: Final = 8 * 1024 * 1024
WAITING_MESSAGES_MAX: Final = 16 * 1024


class Control:
    """`hear` gets every message; `lost` is called once, with the reason, and nothing is heard after it."""

    def __init__(self, channel: socket.socket, hear: Callable[[Message], None], lost: Callable[[str], None]) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._hear = hear
        self._lost = lost
        self._frames = Frames()
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._waiting_bytes = 0
        self._is_writing = False
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        self.heard = 0
        """Messages so far."""
        self._loop.add_reader(channel, self._readable)

    @property
    def is_open(self) -> bool:
        return self._is_open

    def send(self, message: dict[str, Any], fd: int = -1) -> None:
        """Takes `fd` over, whatever happens. ValueError when the message is too long; then nothing was sent."""
        try:
            data = told(message)
        except ValueError:
            _close(fd)
            raise
        if not self._is_open:
            _close(fd)
            return
        self._waiting.append((data, fd))
        self._waiting_bytes += len(data)
        if not self._is_writing:
            self._write()
        if self._waiting_bytes > WAITING_BYTES_MAX or len(self._waiting) > WAITING_MESSAGES_MAX:
            self._fail("does not read what it is told")

    def unread(self) -> int:
        """What the kernel holds that the process has not read; 0: it has read all. A measure, not bytes."""
        if not self._is_open:
            return 0
        found = fcntl.ioctl(self._channel, termios.TIOCOUTQ, b"\0\0\0\0")
        return self._waiting_bytes + int(struct.unpack("i", found)[0])

    def close(self) -> None:
        """Descriptors that were not sent are closed with it. The channel itself is the process's owner's."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._channel)
        if self._is_writing:
            self._loop.remove_writer(self._channel)
        for _, fd in self._waiting:
            _close(fd)
        self._waiting.clear()

    def _fail(self, reason: str) -> None:
        if self._is_open:
            self.close()
            self._lost(reason)

    def _readable(self) -> None:
        try:
            data = self._channel.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as bad:
            self._fail(f"its channel broke: {bad.strerror}")
            return
        if not data:
            self._fail("it hung up")
            return
        try:
            for message in self._frames.feed(data):
                self.heard += 1
                self._hear(message)
                if not self._is_open:
                    return
        except Lie as lie:
            self._fail(f"it lied: {lie}")

    def _write(self) -> None:
        try:
            while self._waiting:
                data, fd = self._waiting[0]
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
                sent = self._channel.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
                self._waiting_bytes -= sent
                _close(fd)
                if sent < len(data):
                    self._waiting[0] = (data[sent:], -1)
                else:
                    self._waiting.popleft()
        except (BlockingIOError, InterruptedError):
            self._watch_writing(True)
            return
        except OSError as bad:
            self._fail(f"its channel broke: {bad.strerror}")
            return
        self._watch_writing(False)

    def _watch_writing(self, wanted: bool) -> None:
        if wanted and not self._is_writing:
            self._loop.add_writer(self._channel, self._write)
        elif not wanted and self._is_writing:
            self._loop.remove_writer(self._channel)
        self._is_writing = wanted


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
