"""A guest in a thread, written from the contract alone: the pump's tests talk to it over a socketpair.

Operations: `source` sends `bytes` bytes of a known pattern, `sink` hashes what it gets, `never` does not answer,
`fail` refuses. It can be told to lie. It follows RESET as the contract says, and can be fed half frames.
"""

import hashlib
import json
import random
import select
import socket
import struct
import threading
import zlib
from collections import deque
from dataclasses import dataclass, field

HELLO = {"gen": 1, "agent": "0.0.0", "arch": "x86_64", "boot": "0" * 32, "ops": ["source", "sink"]}
PATTERN = random.Random(7).randbytes(1_000_003)
NAMES = {
    "HELLO": 1, "OPEN": 2, "OPENED": 3, "DATA": 4, "CREDIT": 5, "EOF": 6, "END": 7, "CONFIRM": 8,
    "ABORT": 9, "TELL": 10, "PING": 11, "PONG": 12, "RESET": 13, "STATE": 14, "RESUME": 15,
}  # fmt: skip


def frame(kind: str, stream: int, payload: bytes | dict = b"") -> bytes:
    raw = json.dumps(payload).encode() if isinstance(payload, dict) else payload
    body = struct.pack("<BII", NAMES[kind], stream, len(raw)) + raw
    return body + struct.pack("<I", zlib.crc32(body))


def pattern(start: int, stop: int) -> bytes:
    out = bytearray()
    while start < stop:
        at = start % len(PATTERN)
        piece = PATTERN[at : at + stop - start]
        out += piece
        start += len(piece)
    return bytes(out)


def pattern_sha256(count: int) -> str:
    digest = hashlib.sha256()
    for at in range(0, count, len(PATTERN)):
        digest.update(pattern(at, min(count, at + len(PATTERN))))
    return digest.hexdigest()


@dataclass
class Line:
    op: str
    total: int = 0
    sent: int = 0
    acked: int = 0
    limit: int = 65_536
    received: int = 0
    granted: int = 65_536
    eof_sent: bool = False
    eof_received: bool = False
    end: dict | None = None
    end_sent: bool = False
    digest: object = field(default_factory=hashlib.sha256)


class FakeGuest(threading.Thread):
    def __init__(self, sock: socket.socket, *, hello: bool = True, frame_bytes: int = 131_072, window: int = 262_144):
        super().__init__(daemon=True)
        self.sock = sock
        self.sock.setblocking(False)
        self.frame_bytes = frame_bytes
        self.window = window
        self.lines: dict[int, Line] = {}
        self.highest_host = self.highest_guest = 0
        self.out: deque[memoryview] = deque()
        self.head_begun = False
        self.inbox = bytearray()
        self.scanning = False
        self.resuming: bytes | None = None
        self.state_override: dict | None = None
        self.reads = threading.Event()
        self.reads.set()
        self.resets = 0
        self.told: list[dict] = []
        if hello:
            self.put("HELLO", 0, HELLO)

    def put(self, kind: str, stream: int, payload: bytes | dict = b"") -> None:
        self.out.append(memoryview(frame(kind, stream, payload)))

    def run(self) -> None:
        try:
            while True:
                self.produce()
                wanted = [self.sock] if self.reads.is_set() else []
                readable, writable, _ = select.select(wanted, [self.sock] if self.out else [], [], 0.05)
                if readable:
                    data = self.sock.recv(1 << 20)
                    if not data:
                        return
                    self.inbox += data
                    self.decode()
                if writable:
                    self.write()
        except (OSError, ValueError):
            return

    def write(self) -> None:
        for _ in range(16):
            if not self.out:
                return
            try:
                count = self.sock.send(self.out[0])
            except BlockingIOError:
                return
            if count == len(self.out[0]):
                self.out.popleft()
                self.head_begun = False
            else:
                self.out[0] = self.out[0][count:]
                self.head_begun = True
                return

    def produce(self) -> None:
        if self.resuming is not None:
            return
        for stream, line in self.lines.items():
            while line.op == "source" and len(self.out) < 8 and line.sent < min(line.total, line.limit):
                stop = min(line.total, line.limit, line.sent + self.frame_bytes)
                self.put("DATA", stream, pattern(line.sent, stop))
                line.sent = stop
            if line.op == "source" and line.sent == line.total and not line.eof_sent:
                line.eof_sent = True
                self.put("EOF", stream, struct.pack("<Q", line.sent))
                line.end = {"ok": {"bytes": line.sent}}
            if line.end is not None and not line.end_sent and (line.eof_sent or line.op != "source"):
                line.end_sent = True
                self.put("END", stream, line.end)

    def decode(self) -> None:
        at = 0
        box = self.inbox
        while True:
            if self.scanning:
                at = box.find(b"\x0d\0\0\0\0\x10\0\0\0", at)
                if at < 0:
                    del box[: max(0, len(box) - 28)]
                    return
            while at < len(box) and box[at] == 0:
                at += 1
            if len(box) - at < 9:
                break
            kind, stream, length = struct.unpack_from("<BII", box, at)
            if kind > 15 or length > 131_072:
                self.scanning = True
                at += 1
                continue
            if len(box) - at < 13 + length:
                break
            body = bytes(box[at : at + 9 + length])
            if zlib.crc32(body) != struct.unpack_from("<I", box, at + 9 + length)[0]:
                self.scanning = True
                at += 1
                continue
            self.scanning = False
            at += 13 + length
            self.take(kind, stream, body[9:])
        del box[:at]

    def take(self, kind: int, stream: int, payload: bytes) -> None:
        name = next(key for key, value in NAMES.items() if value == kind)
        if name == "PING":
            self.put("PONG", 0, payload)
        elif name == "OPEN":
            self.take_open(stream, json.loads(payload))
        elif name == "RESET":
            self.take_reset(payload)
        elif name == "RESUME":
            self.take_resume(payload)
        elif (line := self.lines.get(stream)) is not None:
            self.take_line(name, stream, line, payload)

    def take_open(self, stream: int, fields: dict) -> None:
        self.highest_host = max(self.highest_host, stream)
        line = self.lines[stream] = Line(fields["op"], total=fields.get("bytes", 0))
        if line.op == "fail":
            line.end = {"error": {"code": "not_found", "message": "no such thing"}}
        elif line.op != "never":
            self.put("OPENED", stream, {"pid": 42})

    def take_line(self, name: str, stream: int, line: Line, payload: bytes) -> None:
        if name == "DATA" and line.op == "sink":
            line.received += len(payload)
            assert line.received <= line.granted, "the host sent beyond its limit"
            line.digest.update(payload)
            line.granted = line.received + self.window
            self.put("CREDIT", stream, struct.pack("<QQ", line.received, line.granted))
        elif name == "EOF":
            line.eof_received = True
            assert struct.unpack("<Q", payload)[0] == line.received
            line.end = {"ok": {"bytes": line.received, "sha256": line.digest.hexdigest()}}
        elif name == "CREDIT":
            consumed, limit = struct.unpack("<QQ", payload)
            line.acked, line.limit = max(line.acked, consumed), max(line.limit, limit)
        elif name == "ABORT":
            line.op = "aborted"
            line.end = line.end or {"error": {"code": "aborted", "message": "as asked"}}
        elif name == "TELL":
            self.told.append(json.loads(payload))
        elif name == "CONFIRM":
            del self.lines[stream]

    def take_reset(self, nonce: bytes) -> None:
        self.resets += 1
        head = self.out[0] if self.head_begun else None
        self.out.clear()
        if head is not None:
            self.out.append(head)
        self.resuming = nonce
        streams = {
            str(stream): {
                "op": line.op, "opened": True, "sent": line.sent, "acked": line.acked, "received": line.received,
                "eof_sent": line.eof_sent, "eof_received": line.eof_received, "ended": line.end is not None,
            }
            for stream, line in self.lines.items()
        }  # fmt: skip
        state = {"streams": streams, "highest_host": self.highest_host, "highest_guest": self.highest_guest}
        self.out.append(memoryview(frame("STATE", 0, nonce + json.dumps(self.state_override or state).encode())))

    def take_resume(self, payload: bytes) -> None:
        assert payload[:16] == self.resuming
        self.resuming = None
        resume = json.loads(payload[16:])
        for stream in list(self.lines):
            named = resume["streams"].get(str(stream))
            if named is None:
                del self.lines[stream]
                continue
            line = self.lines[stream]
            line.sent = named["logged"]
            line.eof_sent = line.end_sent = False
            if line.op == "sink":
                line.granted = line.received + self.window
                self.put("CREDIT", stream, struct.pack("<QQ", line.received, line.granted))
