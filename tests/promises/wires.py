"""What the tests of streams and files share: bytes both sides can make, the API without the SDK, a process's peak."""

from __future__ import annotations

import hashlib
import http.client
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.promises.nodes import RealNode

MIB = 1024 * 1024

WRITER = """
import random, sys, time
count, seed, delay_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
block = bytearray(random.Random(seed).randbytes(1 << 20))
for number in range(count):
    block[:8] = number.to_bytes(8, "little")
    sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()
    if delay_s:
        time.sleep(delay_s)
"""


def writer(mib: int, seed: int, *, delay_s: float = 0) -> list[str]:
    """A command that prints what `written` gives."""
    return ["python3", "-c", WRITER, str(mib), str(seed), str(delay_s)]


def written(mib: int, seed: int) -> Iterator[bytes]:
    """Random bytes, a number at each MiB: a byte lost, doubled or moved changes the hash."""
    block = bytearray(random.Random(seed).randbytes(MIB))
    for number in range(mib):
        block[:8] = number.to_bytes(8, "little")
        yield bytes(block)


def sha256(parts: Iterator[bytes] | list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


class Wire(http.client.HTTPConnection):
    """HTTP over the node's socket, as any program would speak it."""

    def __init__(self, node: RealNode, timeout_s: float = 60.0) -> None:
        super().__init__("cloche", timeout=timeout_s)
        self._path = str(node.paths.api_socket)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

    def ask(self, path: str, **headers: str) -> http.client.HTTPResponse:
        """GET; a name's `_` is a header's `-`."""
        self.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        return self.getresponse()


class Peak:
    """How far a process grew above what it held at the beginning; `grown` in bytes, after the block."""

    grown = 0


@contextmanager
def peak_of(pid: int) -> Iterator[Peak]:
    """The kernel's own high-water mark, set back to the present size first: no sample can miss it."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before, peak = _status(pid, "VmRSS"), Peak()
    yield peak
    peak.grown = _status(pid, "VmHWM") - before


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)
