"""How long one waits: for a new sandbox's first byte, and for a small command."""

import contextlib
import time
from typing import Self

from tests.promises.nodes import real_node
from tools.bench import bare
from tools.bench.bare import Bare
from tools.bench.figure import figure
from tools.bench.lean import EVENTS, Connection

MS = 1000.0


class Beside:
    """A node and a bare engine on the same machine, for the time of one figure."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            node = stack.enter_context(real_node())
            self.bare_engine = stack.enter_context(Bare())
            self.connection = Connection(node.paths.api_socket)
            stack.callback(self.connection.close)
            self.prepare(stack)
            self.stack = stack.pop_all()
        return self

    def prepare(self, stack: contextlib.ExitStack) -> None:
        """What a figure needs besides; undone with the rest."""

    def __exit__(self, *_: object) -> None:
        self.stack.close()


@figure("cold_create", unit="ms", at_most=1.15)
class ColdCreate(Beside):
    """From the request for a sandbox to the first byte of its `echo`, against `runsc run --detach`."""

    def ours(self) -> float:
        node = self.connection
        began = time.perf_counter()
        made = node.ask("POST", "/v1/sandboxes", {"command": {"argv": ["/bin/echo", "42"]}})
        output = f"/v1/sandboxes/{made['id']}/commands/{made['first_command']}/output?follow=1"
        pieces = node.stream("GET", output)
        said = bytes(next(pieces))
        seconds = time.perf_counter() - began
        assert said + b"".join(pieces) == b"42\n"
        node.ask("DELETE", f"/v1/sandboxes/{made['id']}")
        return seconds * MS

    def bare(self) -> float:
        return bare.cold_create(self.bare_engine) * MS


@figure("exec_round_trip", unit="ms", at_most=0.45, samples_ci=30, samples_long=200)
class ExecRoundTrip(Beside):
    """`/bin/true` over HTTP to its end, against `runsc exec` in an equal sandbox."""

    def prepare(self, stack: contextlib.ExitStack) -> None:
        self.sandbox = self.connection.ask("POST", "/v1/sandboxes", {})["id"]
        self.bare_sandbox = stack.enter_context(self.bare_engine.sandbox("/bin/sleep", "1000000"))
        self.bare_sandbox.run(until="exit")

    def ours(self) -> float:
        began = time.perf_counter()
        path = f"/v1/sandboxes/{self.sandbox}/commands"
        said = b"".join(self.connection.stream("POST", path, {"argv": ["/bin/true"]}, accept=EVENTS))
        seconds = time.perf_counter() - began
        assert b"event: end" in said
        assert b'"reason":"exited"' in said.replace(b" ", b""), said
        return seconds * MS

    def bare(self) -> float:
        return bare.exec_round_trip(self.bare_sandbox) * MS
