"""This terminal joined to a command's terminal: raw mode, resize, detach, and the end that comes back.

Enter, then `~.` leaves the command running and gives the terminal back, as ssh does; `~~` sends one tilde. Every
other key goes in, Ctrl-C too.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cloche.client import Command, Terminal
    from cloche.wire.commands import Command as CommandView
    from cloche.wire.commands import Terminal as TerminalRequest

READ_BYTES: Final = 64 * 1024
RECONNECT_S_MAX: Final = 60.0
LOOK_S: Final = 0.5
RESEND_LOOK_S: Final = 0.05
PLAIN_SCREEN: Final = "\x1b[?1049l\x1b[?2004l\x1b[?1000l\x1b[?25h\x1b[0m\r\n"
"""No alternate screen, no bracketed paste, no mouse, a cursor, no colours."""
END_OF_FILE: Final = b"\x04"
"""Ctrl-D: what a terminal reads as end of file, sent when our stdin is not a terminal and ends."""


def window_size() -> os.terminal_size:
    """The window's own: LINES and COLUMNS, where exported, are the size that it once had."""
    for stream in (sys.__stdout__, sys.__stdin__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no terminal, closed, absent
            size = os.get_terminal_size(stream.fileno())  # type: ignore[union-attr]
            if size.lines and size.columns:
                return size
    return os.terminal_size((80, 24))


def local_terminal() -> "TerminalRequest":
    """A terminal of our size and kind."""
    from cloche.wire.commands import Terminal

    size = window_size()
    term = os.environ.get("TERM", "xterm-256color")
    fields: dict[str, Any] = {"rows": max(1, min(size.lines, 1000)), "cols": max(1, min(size.columns, 1000))}
    try:
        return Terminal(**fields, term=term)
    except ValueError:  # a TERM that no terminfo would know either
        return Terminal(**fields)


class DetachFilter:
    """Finds `~.` after Enter in what is typed; pure."""

    def __init__(self) -> None:
        self._at_line_start = True
        self._held = False
        self.detached = False

    def feed(self, data: bytes) -> bytes:
        """What goes to the command."""
        sent = bytearray()
        for byte in data:
            if self._held:
                self._held = False
                if byte == ord("."):
                    self.detached = True
                    return bytes(sent)
                if byte != ord("~"):
                    sent += b"~"
                sent.append(byte)
                self._at_line_start = byte in b"\r\n"
            elif byte == ord("~") and self._at_line_start:
                self._held = True
            else:
                sent.append(byte)
                self._at_line_start = byte in b"\r\n"
        return bytes(sent)


@contextlib.contextmanager
def raw_mode(fd: int) -> Iterator[None]:
    """Keys arrive one by one and unread; whatever happens, the terminal is given back as it was."""
    if not os.isatty(fd):
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resize_pipe() -> Iterator[int]:
    """A descriptor that becomes readable when the window's size changes."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def note(_number: int, _frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(writer, b"r")

    before = signal.signal(signal.SIGWINCH, note)
    try:
        yield reader
    finally:
        signal.signal(signal.SIGWINCH, before)
        os.close(reader)
        os.close(writer)


class _Attached:
    """One attachment: the keyboard's thread writes, the main thread reads."""

    def __init__(self, job: "Command", *, stdin: bool) -> None:
        self._job = job
        self._stdin = stdin
        self._filter = DetachFilter()
        self._line: Terminal = job.attach()
        self._done = threading.Event()

    def run(self) -> "CommandView | None":
        """The command's last view, or None when the person detached."""
        with _resize_pipe() as resized, raw_mode(sys.stdin.fileno()) if self._stdin else contextlib.nullcontext():
            keyboard = threading.Thread(target=self._type, args=(resized,), name="keyboard", daemon=True)
            keyboard.start()
            try:
                while not self._read():
                    if self._filter.detached:
                        _leave_screen()
                        return None
                    self._reconnect()
                return self._line.view
            finally:
                self._done.set()
                self._line.close()
                keyboard.join(2 * LOOK_S)

    def _read(self) -> bool:
        """True at the command's end, False when the line broke."""
        from cloche.wire.errors import ClocheError

        try:
            while data := self._line.receive():
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
        except ClocheError as error:
            if not (error.kind.retryable or self._filter.detached):
                raise
            return False
        return True

    def _reconnect(self) -> None:
        """A new line from the cursor; the node may be restarting."""
        from cloche.wire.errors import ClocheError

        give_up = time.monotonic() + RECONNECT_S_MAX
        while True:
            try:
                self._line = self._job.attach(from_=self._line.cursor)
                return
            except ClocheError as error:
                if not error.kind.retryable or time.monotonic() > give_up:
                    raise
                time.sleep(0.2)

    def _type(self, resized: int) -> None:
        sources = [resized, *([sys.stdin.fileno()] if self._stdin else [])]
        while not self._done.is_set():
            ready, _, _ = select.select(sources, [], [], LOOK_S)
            if resized in ready and not self._done.is_set():
                os.read(resized, READ_BYTES)
                self._send(self._resize)
            if len(sources) > 1 and sources[1] in ready and not self._done.is_set():
                self._keys(sources)

    def _resize(self) -> None:
        size = window_size()
        self._line.resize(size.lines, size.columns)

    def _keys(self, sources: list[int]) -> None:
        data = os.read(sources[1], READ_BYTES)
        typed = self._filter.feed(data) if os.isatty(sources[1]) else data or END_OF_FILE
        if typed:
            self._send(lambda: self._line.send(typed))
        if not data:
            sources.pop()
        if self._filter.detached:
            self._done.set()
            self._line.close()  # the reading side wakes up

    def _send(self, send: Callable[[], object]) -> None:
        """On a line that broke: again on the next one, which the reading side makes. What was typed is not lost."""
        from cloche.wire.errors import ClocheError

        while not self._done.is_set():
            line = self._line
            try:
                send()
                return
            except ClocheError:
                while self._line is line and not self._done.wait(RESEND_LOOK_S):
                    pass


def _leave_screen() -> None:
    """What a program inside may have switched on, off again: it goes on, but not on this screen."""
    if sys.stdout.isatty():
        sys.stdout.write(PLAIN_SCREEN)
        sys.stdout.flush()


def attach(job: "Command", *, stdin: bool) -> "CommandView | None":
    """Joins this terminal to the command's; its last view, or None when the person detached."""
    return _Attached(job, stdin=stdin).run()
