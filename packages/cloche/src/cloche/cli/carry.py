"""Moves a command's bytes: its output to ours, our stdin to it by offset, Ctrl-C as a signal.

The command is an object on the node, not a connection: when the connection breaks, the SDK reads on from the
cursor and writes on from the offset that the guest confirmed, so nothing is lost and nothing comes twice.
"""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cloche.client import Command
    from cloche.wire.commands import Command as CommandView

STDIN_CHUNK_BYTES: Final = 256 * 1024
FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
OVER: Final = frozenset({"command_ended", "sandbox_ended", "stdin_closed", "not_found"})


class ReaderLeft(Exception):
    """Whoever read our output is gone. Not an OSError: click would make exit code 1 of that."""


def carry(job: "Command", *, stdin: bool, kill: Callable[[], object]) -> "CommandView":
    """Until the command has ended; answers its last view. `kill` is what a second Ctrl-C does."""
    with _forwarded_signals(job, kill):
        if stdin:
            threading.Thread(target=pump_stdin, args=(job, 0), name="stdin", daemon=True).start()
        try:
            for chunk in job.output():
                write(chunk.fd, chunk.data)
        except BrokenPipeError:
            kill()  # nobody reads any more, as for a program in a shell's pipeline
            raise ReaderLeft from None
        if job.view.ended is None:
            job.wait()
        return job.view


def write(fd: int, data: bytes) -> None:
    stream = sys.stderr.buffer if fd == 2 else sys.stdout.buffer
    stream.write(data)
    stream.flush()


def pump_stdin(job: "Command", source: int) -> None:
    """Our stdin, byte for byte, then end of file. A command that ends first is no error."""
    from cloche.wire.errors import ClocheError

    try:
        while data := _read(source):
            job.write_stdin(data)
        job.close_stdin()
    except ClocheError as error:
        if error.code not in OVER:
            from cloche.cli.failure import show_error

            show_error(error)


def _read(source: int) -> bytes:
    try:
        return os.read(source, STDIN_CHUNK_BYTES)
    except OSError:
        return b""


@contextmanager
def _forwarded_signals(job: "Command", kill: Callable[[], object]) -> Iterator[None]:
    """Signals that we get go to the command; the second Ctrl-C calls `kill`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def note(number: int, _frame: FrameType | None) -> None:
        caught.put(number)  # nothing else is safe inside a signal handler

    before = {number: signal.signal(number, note) for number in FORWARDED}
    threading.Thread(target=_send_signals, args=(job, kill, caught), name="signals", daemon=True).start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        caught.put(None)


def _send_signals(job: "Command", kill: Callable[[], object], caught: "queue.SimpleQueue[int | None]") -> None:
    from cloche.wire.errors import ClocheError

    interrupts = 0
    while (number := caught.get()) is not None:
        interrupts += number == signal.SIGINT
        try:
            if interrupts > 1:
                kill()
            else:
                job.signal(number)
        except ClocheError as error:
            if error.code not in OVER:
                kill()
