"""A guest that opens streams, written from the contract alone; it can be as rude as a test wants."""

import asyncio
import json
import socket
import struct

from tests.unit.channel.fake_guest import HELLO, NAMES, frame

KINDS = {value: key for key, value in NAMES.items()}
WINDOW = 1 << 20


class GuestStream:
    """One stream that the guest opened."""

    def __init__(self, guest: "Guest", stream: int) -> None:
        self.id = stream
        self.inbox = bytearray()
        self.opened = self.eof_received = False
        self.result: dict | None = None
        self.grants = True
        """Whether it reads: without, no credit goes back."""
        self._guest = guest
        self._limit = 65_536
        self._sent = self._received = 0
        self._granted = 65_536

    def send(self, data: bytes) -> None:
        """Without regard to credit: enough for heads and hellos."""
        for at in range(0, len(data), 131_072):
            piece = data[at : at + 131_072]
            self._sent += len(piece)
            self._guest.put("DATA", self.id, piece)

    async def send_all(self, data: bytes) -> None:
        """As credit allows."""
        while data:
            await self._guest.until(lambda: self._limit > self._sent or self.result is not None)
            if self.result is not None:
                raise ConnectionResetError(self.result)
            piece = data[: min(self._limit - self._sent, 131_072)]
            self.send(piece)
            data = data[len(piece) :]

    def eof(self) -> None:
        self._guest.put("EOF", self.id, struct.pack("<Q", self._sent))

    def abort(self) -> None:
        self._guest.put("ABORT", self.id, {"reason": "gone"})

    async def read(self, marker: bytes) -> bytes:
        """Up to and with the marker."""
        await self._guest.until(lambda: marker in self.inbox or self.eof_received or self.result is not None)
        at = self.inbox.find(marker)
        assert at >= 0, f"{marker!r} did not come: {bytes(self.inbox)!r} {self.result}"
        taken = bytes(self.inbox[: at + len(marker)])
        del self.inbox[: at + len(marker)]
        return taken

    async def rest(self) -> bytes:
        """All until the host's EOF or END."""
        await self._guest.until(lambda: self.eof_received or self.result is not None)
        return bytes(self.inbox)

    async def end(self) -> dict:
        await self._guest.until(lambda: self.result is not None)
        assert self.result is not None
        return self.result

    def take(self, kind: str, payload: bytes) -> None:
        if kind == "OPENED":
            self.opened = True
        elif kind == "DATA":
            self._received += len(payload)
            assert self._received <= self._granted, "the host sent beyond its limit"
            self.inbox += payload
            if self.grants and self._granted - self._received <= WINDOW // 2:
                self.grant()
        elif kind == "CREDIT":
            _, self._limit = struct.unpack("<QQ", payload)
        elif kind == "EOF":
            assert struct.unpack("<Q", payload)[0] == self._received
            self.eof_received = True
        elif kind == "END":
            self.result = json.loads(payload)
            self._guest.put("CONFIRM", self.id)

    def grant(self) -> None:
        self._granted = self._received + WINDOW
        self._guest.put("CREDIT", self.id, struct.pack("<QQ", self._received, self._granted))


class Guest:
    """Reads and writes one end of a socketpair in the test's own loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.streams: dict[int, GuestStream] = {}
        self.refused = 0
        self._next = 1
        self._inbox = bytearray()
        self._out = bytearray()
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._readable)
        self.put("HELLO", 0, HELLO)

    def open(self, op: str, **fields: object) -> GuestStream:
        stream = GuestStream(self, self._next)
        self.streams[stream.id] = stream
        self._next += 2
        self.put("OPEN", stream.id, {"op": op, **fields})
        return stream

    async def ask(self, name: str) -> list[int]:
        """What `resolve` answers."""
        result = await self.open("resolve", name=name, type=1).end()
        ports: list[int] = result["ok"]["ports"]
        return ports

    def put(self, kind: str, stream: int, payload: bytes | dict = b"") -> None:
        self._out += frame(kind, stream, payload)
        self._flush()

    async def until(self, condition, timeout_s: float = 10) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def close(self) -> None:
        self._loop.remove_reader(self.sock.fileno())
        self._loop.remove_writer(self.sock.fileno())
        self.sock.close()

    def _flush(self) -> None:
        try:
            count = self.sock.send(self._out) if self._out else 0
        except BlockingIOError:
            count = 0
        del self._out[:count]
        if self._out:
            self._loop.add_writer(self.sock.fileno(), self._flush)
        else:
            self._loop.remove_writer(self.sock.fileno())

    def _readable(self) -> None:
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self.sock.fileno())
            return
        self._inbox += data
        at = 0
        while len(self._inbox) - at >= 13:
            kind, stream, length = struct.unpack_from("<BII", self._inbox, at)
            if len(self._inbox) - at < 13 + length:
                break
            payload = bytes(self._inbox[at + 9 : at + 9 + length])
            at += 13 + length
            if stream in self.streams:
                self.streams[stream].take(KINDS[kind], payload)
        del self._inbox[:at]
        self._changed.set()
