"""A sandbox's writable layer as a stream: the sentry writes a tar into a pipe, a thread moves it on, both are bounded.

The sentry's word is a guest's: it may write for ever, write nothing, answer before it has written, or never answer. What it
writes is not looked at here. The bytes do not pass through the event loop, nor through Python: the kernel moves them.

The sentry reads one file at a time whole into its memory: a file that does not fit beside the guest ends the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import time
from typing import Final

from cloche_server.engines.contract import EngineError
from cloche_server.engines.gvisor.control import CALL_S, Control

EXPORT_S: Final = 900.0
"""For all of it: the guest stands still meanwhile."""
STALL_S: Final = 30.0
"""Without a byte."""
PIECE_BYTES: Final = 1 << 20
PIPE_BYTES: Final = 1 << 20


async def export(control: Control, sink_fd: int, bytes_max: int) -> int:
    """How many bytes went to the sink. The sentry is paused already."""
    source, target = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(PermissionError):  # many pipes of this user: a smaller one is only slower
        fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    mover = Mover(source, sink_fd, bytes_max)
    asking = asyncio.create_task(control.tar_upper(target, EXPORT_S))
    moving = asyncio.create_task(asyncio.to_thread(mover.run))
    try:
        await asyncio.wait([asking, moving], return_when=asyncio.FIRST_EXCEPTION, timeout=EXPORT_S)
        if moving.done() and not asking.done() and moving.exception() is None:
            await asyncio.wait([asking], timeout=CALL_S)  # all is there, and only the sentry's word is missing
        return _outcome(asking, moving)
    finally:
        asking.cancel()
        mover.stop()
        await asyncio.shield(_end(asking, moving))
        mover.close()


async def _end(*tasks: asyncio.Task[None] | asyncio.Task[int]) -> None:
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen: the first failure is the one that is told


def _outcome(asking: asyncio.Task[None], moving: asyncio.Task[int]) -> int:
    for task in (moving, asking):
        if task.done() and (bad := task.exception()) is not None:
            raise bad
    if not asking.done() or not moving.done():
        raise EngineError("unresponsive", "the engine did not finish the export of its layer")
    return moving.result()


class Mover:
    """Moves a pipe's bytes to the sink, in a thread of its own, until the pipe ends."""

    def __init__(self, source: int, sink: int, bytes_max: int) -> None:
        self._source = source
        self._sink = sink
        self._bytes_max = bytes_max
        self._stopped_in, self._stopped_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> int:
        deadline = time.monotonic() + EXPORT_S
        moved = 0
        while True:
            self._wait(self._source, select.POLLIN, deadline)
            # One byte more than allowed tells a layer that is too large from one that just fits.
            wanted = min(PIECE_BYTES, self._bytes_max + 1 - moved)
            try:
                piece = os.splice(self._source, self._sink, wanted, flags=os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE)
            except BlockingIOError:  # the sink is a pipe, and full
                self._wait(self._sink, select.POLLOUT, deadline)
                continue
            if piece == 0:
                return moved
            moved += piece
            if moved > self._bytes_max:
                raise EngineError("too_large", f"the sandbox's writable layer has more than {self._bytes_max} bytes")

    def stop(self) -> None:
        """Ends `run` soon, from another thread."""
        os.write(self._stopped_out, b"x")

    def close(self) -> None:
        for fd in (self._source, self._stopped_in, self._stopped_out):
            os.close(fd)

    def _wait(self, fd: int, events: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(fd, events)
        poll.register(self._stopped_in, select.POLLIN)
        left = min(STALL_S, deadline - time.monotonic())
        ready = poll.poll(max(0.0, left) * 1000)
        if not ready:
            raise EngineError("unresponsive", f"no byte of the sandbox's layer moved in {STALL_S:g} s")
        if any(each == self._stopped_in for each, _ in ready):
            raise EngineError("host_failure", "the export was given up")
