"""The control channel: framed JSON both ways on one unix stream socket, with descriptors from the gate.

A message is a length (u32, little endian) and that many bytes of JSON. At most one descriptor comes with a message, in
the order of the messages; `open` always has one, `dialled` when it tells no error. When the channel ends or breaks, so
does the process, and every connection with it.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final

Message = dict[str, Any]
_LENGTH: Final = struct.Struct("<I")
_MESSAGE_BYTES_MAX: Final = 1 << 20
_OUT_BYTES_MAX: Final = 8 << 20
_RECEIVE_BYTES: Final = 256 << 10
_DESCRIPTORS_MAX: Final = 64


class Broken(Exception):
    """The channel cannot go on."""


class Control:
    """`received` gets each message, with its descriptor if it has one; `ended` is called once when the channel is over."""

    def __init__(
        self,
        channel: socket.socket,
        received: Callable[[Message, socket.socket | None], None],
        ended: Callable[[str], None],
    ) -> None:
        self._channel = channel
        self._received = received
        self._ended = ended
        self._in = bytearray()
        self._descriptors: deque[int] = deque()
        self._out = bytearray()
        self._waits = False
        self._loop = asyncio.get_running_loop()
        channel.setblocking(False)
        self._loop.add_reader(channel, self._readable)

    def send(self, message: Message) -> None:
        """Never waits; a gate that does not read ends the process rather than filling its memory."""
        body = json.dumps(message, separators=(",", ":")).encode()
        self._out += _LENGTH.pack(len(body)) + body
        if len(self._out) > _OUT_BYTES_MAX:
            self._end("the gate does not read")
        elif not self._waits:
            # At once: a refusal is known to the gate before the client can read it.
            self._flush()

    def _flush(self) -> None:
        try:
            del self._out[: self._channel.send(self._out)]
        except BlockingIOError:
            pass  # it goes on when there is room
        except OSError as failure:
            self._end(f"sending failed: {type(failure).__name__}")
            return
        if bool(self._out) is not self._waits:
            self._waits = not self._waits
            if self._waits:
                self._loop.add_writer(self._channel, self._flush)
            else:
                self._loop.remove_writer(self._channel)

    def _readable(self) -> None:
        try:
            self._receive()
            while (message := self._next()) is not None:
                self._received(message, self._descriptor_of(message))
        except BlockingIOError:
            return
        except (OSError, Broken, ValueError) as failure:
            self._end(f"{type(failure).__name__}: {failure}" if isinstance(failure, Broken) else type(failure).__name__)

    def _receive(self) -> None:
        room = socket.CMSG_SPACE(array.array("i").itemsize * _DESCRIPTORS_MAX)
        data, extra, flags, _ = self._channel.recvmsg(_RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(content[: len(content) - len(content) % found.itemsize])
                self._descriptors.extend(found)
        if flags & socket.MSG_CTRUNC:
            raise Broken("descriptors were cut off")
        if not data:
            raise Broken("the gate closed the channel")
        self._in += data

    def _next(self) -> Message | None:
        if len(self._in) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._in)
        if length > _MESSAGE_BYTES_MAX:
            raise Broken("a message is too long")
        end = _LENGTH.size + length
        if len(self._in) < end:
            return None
        message = json.loads(self._in[_LENGTH.size : end])
        del self._in[:end]
        if not isinstance(message, dict):
            raise Broken("a message is not an object")
        return message

    def _descriptor_of(self, message: Message) -> socket.socket | None:
        has_one = message.get("t") == "open" or (message.get("t") == "dialled" and message.get("error") is None)
        if not has_one:
            return None
        if not self._descriptors:
            raise Broken("a message lacks its descriptor")
        return socket.socket(fileno=self._descriptors.popleft())

    def _end(self, why: str) -> None:
        self._loop.remove_reader(self._channel)
        self._loop.remove_writer(self._channel)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._ended(why)
