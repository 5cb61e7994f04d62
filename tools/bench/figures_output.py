"""How fast bulk output reaches a reader, against the same bytes through the channel and dropped."""

import contextlib
import time
from typing import Any, Self

from cloche.wire.defaults import MIB
from tests.promises.nodes import real_node
from tools.bench import bare
from tools.bench.figure import figure
from tools.bench.lean import EVENTS, Connection

WRITER = "import os\nblock = bytes(65536)\nfor _ in range({blocks}): os.write(1, block)"
BLOCK_BYTES = 65536


def writer(size: int) -> dict[str, Any]:
    """A guest program that writes so many bytes, 64 KiB at a time, and no byte of them is ever given up."""
    program = WRITER.format(blocks=size // BLOCK_BYTES)
    return {"argv": ["/usr/bin/python3", "-c", program], "on_full": "block"}


class Bulk:
    """One node that is read from and one that drops, each with an idle sandbox."""

    is_long = False

    def __enter__(self) -> Self:
        self.size = 1024 * MIB if self.is_long else 256 * MIB
        with contextlib.ExitStack() as stack:
            nodes = (stack.enter_context(real_node()), stack.enter_context(bare.dropping_node()))
            self.read, self.drop = (Connection(node.paths.api_socket) for node in nodes)
            self.boxes = [each.ask("POST", "/v1/sandboxes", {})["id"] for each in (self.read, self.drop)]
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.read.close()
        self.drop.close()
        self.stack.close()

    def bare(self) -> float:
        return self._rate(bare.output_dropped(self.drop, self.boxes[1], writer(self.size)))

    def _rate(self, seconds: float) -> float:
        return self.size / MIB / seconds


@figure("stdout_raw", unit="MiB/s", at_least=0.5, samples_ci=5)
class StdoutRaw(Bulk):
    """As a raw body."""

    def ours(self) -> float:
        began = time.perf_counter()
        path = f"/v1/sandboxes/{self.boxes[0]}/commands"
        made = self.read.ask("POST", path, writer(self.size))
        found = sum(map(len, self.read.stream("GET", f"{path}/{made['id']}/output?follow=1")))
        seconds = time.perf_counter() - began
        assert found == self.size, f"{found} of {self.size} bytes"
        return self._rate(seconds)


@figure("stdout_sse", unit="MiB/s", at_least=0.35, samples_ci=5)
class StdoutSse(Bulk):
    """As events: base64, each with the cursor after it."""

    def ours(self) -> float:
        began = time.perf_counter()
        path = f"/v1/sandboxes/{self.boxes[0]}/commands"
        found, tail = 0, b""
        for piece in self.read.stream("POST", path, writer(self.size), accept=EVENTS):
            found += len(piece)
            tail = (tail + piece[-4096:])[-4096:]
        seconds = time.perf_counter() - began
        assert found > self.size * 4 // 3, f"{found} bytes of events"
        assert b"event: end" in tail
        assert f'"end":{self.size}'.encode() in tail.replace(b" ", b""), tail
        return self._rate(seconds)
