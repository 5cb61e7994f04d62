"""What the tests of hostile guests share: the rules a guest can break, its neighbour, and how the daemon bears it."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path
from typing import Any

from cloche.client import Sandbox
from cloche.wire.errors import ClocheError
from cloche_server.channel.frames import Kind, encode, encode_credit, encode_json, encode_offset
from tests.promises.evil import raw, spec
from tests.promises.nodes import RealNode, wait_until

FULL_TIMEOUT_S = 3600
GROWTH_BYTES_MAX = 64 * 1024 * 1024
SMALL: dict[str, Any] = {"memory_mb": 64, "disk_mb": 64}
ESCAPES = "\x1b[2J\x1b]52;c;aGk=\x07\u202eevil\x9b31m"
OK = encode_json({"ok": {"code": 0}})
OPEN = encode_json({"op": "connect"})

BROKEN: dict[str, list[str]] = {
    "a wrong checksum": [raw(encode(Kind.PONG, 0, b"x")[:-1] + b"\0")],
    "an unknown kind": [raw(encode(200, 0, b"x"))],
    "an oversized frame": [raw(b"\x04" + b"\x04\0\0\0" + b"\xff\xff\xff\xff" + bytes(64))],
    "a frame one byte too long": [raw(b"\x04" + b"\x04\0\0\0" + (131_073).to_bytes(4, "little") + bytes(64))],
    "noise": [raw(bytes((n * 7919 + 11) % 251 + 1 for n in range(4096)))],
    "another protocol": [raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")],
    "a long ping": [spec(Kind.PING, 0, bytes(65))],
    "a long pong": [spec(Kind.PONG, 0, bytes(65))],
    "HELLO again": [spec(Kind.HELLO, 0, encode_json({"gen": 1}))],
    "STATE without RESET": [spec(Kind.STATE, 0, bytes(16) + b"{}")],
    "RESET by the guest": [spec(Kind.RESET, 0, bytes(16))],
    "RESUME by the guest": [spec(Kind.RESUME, 0, bytes(16) + b"{}")],
    "DATA on the channel itself": [spec(Kind.DATA, 0, b"x")],
    "OPEN of a host's id": [spec(Kind.OPEN, 1000, OPEN)],
    "OPEN backwards": [spec(Kind.OPEN, 5, OPEN), spec(Kind.OPEN, 3, OPEN)],
    "OPEN of the same id": [spec(Kind.OPEN, 5, OPEN), spec(Kind.OPEN, 5, OPEN)],
    "OPEN without op": [spec(Kind.OPEN, 1, b"{}")],
    "OPEN that is a list": [spec(Kind.OPEN, 1, b"[]")],
    "OPEN nested deeply": [spec(Kind.OPEN, 1, b'{"op":' + b"[" * 5000 + b"]" * 5000 + b"}")],
    "OPEN that is not JSON": [spec(Kind.OPEN, 1, b'{"op": NaN}')],
    "END of a foreign stream": [spec(Kind.END, 4242, OK)],
    "END twice": [spec(Kind.END, "s", OK), spec(Kind.END, "s", OK)],
    "END of stderr": [spec(Kind.END, "e", OK)],
    "END that is a list": [spec(Kind.END, "s", b"[]")],
    "END with neither": [spec(Kind.END, "s", b'{"x":1}')],
    "OPENED twice": [spec(Kind.OPENED, "s", b"{}")],
    "more data than the limit": [f"{int(Kind.DATA)}:s:z131072"],
    "data after EOF": [spec(Kind.EOF, "s", encode_offset(0)), spec(Kind.DATA, "s", b"x")],
    "EOF of the future": [spec(Kind.EOF, "s", encode_offset(5))],
    "EOF twice": [spec(Kind.EOF, "s", encode_offset(0)), spec(Kind.EOF, "s", encode_offset(0))],
    "EOF too short": [spec(Kind.EOF, "s", b"\0")],
    "credit going back": [spec(Kind.CREDIT, "s", encode_credit(0, 1))],
    "credit for what was not sent": [spec(Kind.CREDIT, "s", encode_credit(99, 99_999))],
    "credit too short": [spec(Kind.CREDIT, "s", b"\0")],
    "CONFIRM of the host's": [spec(Kind.CONFIRM, "s")],
    "ABORT of the host's": [spec(Kind.ABORT, "s", b"{}")],
    "TELL of the host's": [spec(Kind.TELL, "s", b"{}")],
}

FLOODS: dict[str, list[str]] = {
    "pings": [spec(Kind.PING, 0, b"12345678")],
    "pongs": [spec(Kind.PONG, 0, b"x")],
    "late credits": [spec(Kind.CREDIT, 2, encode_credit(0, 1))],
    "equal credits": [spec(Kind.CREDIT, "s", encode_credit(0, 65_536))],
    "empty data": [spec(Kind.DATA, "s")],
    "late frames reordered": [
        spec(Kind.EOF, 2, b""),
        spec(Kind.DATA, 2, b"x"),
        spec(Kind.ABORT, 2),
        spec(Kind.TELL, 2),
    ],
    "all of them": [spec(Kind.PING, 0), spec(Kind.DATA, "s"), spec(Kind.CREDIT, 2, b"?"), spec(Kind.PONG, 0, b"y")],
}


def daemon_peak_bytes(node: RealNode) -> int:
    for line in Path(f"/proc/{node.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def ended(box: Sandbox) -> str:
    """Why it ended, once it has."""
    wait_until(lambda: box.info().ended is not None, 60, f"the end of {box.id}")
    end = box.info().ended
    assert end is not None
    assert (end.detail or "").isprintable(), end.detail
    return end.reason.value


class Neighbour:
    """An honest sandbox of the same node, asked all the time by somebody else."""

    def __init__(self, node: RealNode, pause_s: float = 0.05) -> None:
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._node = node
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        try:
            with self._node.sandbox(**SMALL) as box:
                while not self._stop.wait(self._pause_s):
                    began = time.perf_counter()
                    result = box.run(["echo", "fine"])
                    self.seconds.append(time.perf_counter() - began)
                    if result.stdout != "fine\n":
                        self.failures.append(repr(result))
        except ClocheError as failed:
            self.failures.append(repr(failed))

    def __enter__(self) -> Neighbour:
        self._thread.start()
        wait_until(lambda: self.seconds or self.failures, 60, "the neighbour's first answer")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def __str__(self) -> str:
        ordered = sorted(self.seconds)
        return f"neighbour: {len(ordered)} commands, median {statistics.median(ordered) * 1000:.1f} ms, worst {ordered[-1] * 1000:.0f} ms"
