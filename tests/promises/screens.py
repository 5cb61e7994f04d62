"""A program under a real pseudo-terminal, and a small reader of what it draws: enough of a VT for vi and top."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from tests.promises.nodes import wait_until

CONTROL = re.compile(r"\x1b\[([?>=!]?)([0-9;:]*)[ -/]*([@-~])")
OTHER = re.compile(r"\x1b(?:\][^\x07\x1b]*(?:\x07|\x1b\\)|P[^\x1b]*\x1b\\|[()*+#%][\x20-\x7e]|[^\[\]P()*+#%])")
PARTIAL = re.compile(r"\x1b(?:\[[?>=!]?[0-9;:]*[ -/]*|\][^\x07\x1b]*\x1b?|P[^\x1b]*\x1b?|[()*+#%])?$")


@dataclass
class Cell:
    """One character, and how it was to be shown (the SGR parameters that hold)."""

    text: str = " "
    style: tuple[int, ...] = ()


class Screen:
    """Bytes in, rows of cells out. Knows the alternate screen, the scroll region and SGR; ignores the rest."""

    def __init__(self, rows: int, cols: int) -> None:
        self.rows, self.cols = rows, cols
        self.is_alternate = False
        self._kept = b""
        self._style: tuple[int, ...] = ()
        self._saved = (0, 0)
        self._behind: list[list[Cell]] = []
        self.resize(rows, cols)

    def resize(self, rows: int, cols: int) -> None:
        """Cleared: whoever draws must draw again."""
        self.rows, self.cols = rows, cols
        self._grid = self._empty(rows)
        self._row = self._col = 0
        self._top, self._bottom = 0, rows - 1

    def _empty(self, count: int) -> list[list[Cell]]:
        return [[Cell() for _ in range(self.cols)] for _ in range(count)]

    # ---------------------------------------------------------------- what can be seen

    def lines(self) -> list[str]:
        return ["".join(cell.text for cell in row).rstrip() for row in self._grid]

    def cells(self) -> list[list[Cell]]:
        return self._grid

    def text(self) -> str:
        return "\n".join(self.lines())

    def styles_of(self, word: str) -> list[set[tuple[int, ...]]]:
        """The styles of each place where `word` stands."""
        found = []
        for row in self._grid:
            line = "".join(cell.text for cell in row)
            places = re.finditer(re.escape(word), line)
            found += [{cell.style for cell in row[place.start() : place.end()]} for place in places]
        return found

    # ---------------------------------------------------------------- what is drawn

    def feed(self, data: bytes) -> None:
        text = (self._kept + data).decode("utf-8", "surrogateescape")
        half = PARTIAL.search(text)
        tail = re.search(r"[\udcc2-\udcf4][\udc80-\udcbf]{0,2}$", text)
        cut = half.start() if half else tail.start() if tail else len(text)
        self._kept = text[cut:].encode("utf-8", "surrogateescape")
        self._draw(text[:cut])

    def _draw(self, text: str) -> None:
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                match = CONTROL.match(text, at)
                if match:
                    self._control(match[1], [int(n) if n.isdigit() else 0 for n in match[2].split(";")], match[3])
                else:
                    match = OTHER.match(text, at)
                    self._escape(text[at : at + 2])
                at = match.end() if match else at + 1
            else:
                self._put(text[at])
                at += 1

    def _put(self, char: str) -> None:
        if char == "\r":
            self._col = 0
        elif char in "\n\v\f":
            self._down()
        elif char == "\b":
            self._col = max(0, self._col - 1)
        elif char == "\t":
            self._col = min(self.cols - 1, self._col // 8 * 8 + 8)
        elif char >= " " and char != "\x7f":
            if self._col >= self.cols:
                self._col = 0
                self._down()
            self._grid[self._row][self._col] = Cell(char, self._style)
            self._col += 1

    def _down(self) -> None:
        if self._row == self._bottom:
            self._scroll(1)
        else:
            self._row = min(self.rows - 1, self._row + 1)

    def _scroll(self, count: int) -> None:
        for _ in range(abs(count)):
            old, new = (self._top, self._bottom) if count > 0 else (self._bottom, self._top)
            del self._grid[old]
            self._grid.insert(new, self._empty(1)[0])

    def _escape(self, two: str) -> None:
        if two == "\x1b7":
            self._saved = (self._row, self._col)
        elif two == "\x1b8":
            self._row, self._col = self._saved
        elif two == "\x1bM":
            if self._row == self._top:
                self._scroll(-1)
            else:
                self._row = max(0, self._row - 1)

    def _control(self, mark: str, numbers: list[int], final: str) -> None:
        if mark == "?":
            if final in "hl" and {1049, 1047, 47}.intersection(numbers):
                self._alternate(final == "h")
            return
        if mark:
            return
        first = numbers[0] or 1
        if final == "m":
            self._dress(numbers)
        elif final in "ABCDEFGHdf":
            self._move(final, first, numbers)
        elif final in "JK":
            self._erase(final, numbers[0])
        elif final in "LMSTP@X":
            self._shift(final, min(first, max(self.rows, self.cols)))
        elif final == "r":
            self._top, self._bottom = first - 1, (numbers[1] if len(numbers) > 1 and numbers[1] else self.rows) - 1
            self._row = self._col = 0

    def _dress(self, numbers: list[int]) -> None:
        last_reset = max((at for at, number in enumerate(numbers) if number == 0), default=-1)
        self._style = tuple(numbers) if last_reset == -1 else tuple(numbers[last_reset + 1 :])
        self._style = tuple(number for number in self._style if number not in (39, 49, 22, 23, 24, 27))

    def _move(self, final: str, count: int, numbers: list[int]) -> None:
        row, col = self._row, min(self._col, self.cols - 1)
        if final in "Hf":
            row, col = count - 1, (numbers[1] if len(numbers) > 1 and numbers[1] else 1) - 1
        elif final in "AF":
            row -= count
        elif final in "BE":
            row += count
        elif final == "C":
            col += count
        elif final == "D":
            col -= count
        elif final == "G":
            col = count - 1
        elif final == "d":
            row = count - 1
        if final in "EF":
            col = 0
        self._row, self._col = max(0, min(self.rows - 1, row)), max(0, min(self.cols - 1, col))

    def _erase(self, final: str, how: int) -> None:
        row = self._grid[self._row]
        begin, stop = (0, self._col + 1) if how == 1 else (0, self.cols) if how >= 2 else (self._col, self.cols)
        for at in range(begin, min(stop, self.cols)):
            row[at] = Cell()
        if final == "J":
            others = range(self._row) if how == 1 else range(self.rows) if how >= 2 else range(self._row + 1, self.rows)
            for number in others:
                self._grid[number] = self._empty(1)[0]

    def _shift(self, final: str, count: int) -> None:
        row = self._grid[self._row]
        if final in "ST":
            self._scroll(count if final == "S" else -count)
        elif final in "LM":
            for _ in range(count):
                old, new = (self._bottom, self._row) if final == "L" else (self._row, self._bottom)
                del self._grid[old]
                self._grid.insert(new, self._empty(1)[0])
        else:
            fresh = [Cell() for _ in range(min(count, self.cols - self._col))]
            if final == "@":
                row[self._col : self._col] = fresh
                del row[self.cols :]
            else:
                del row[self._col : self._col + len(fresh)]
                at = self._col if final == "X" else len(row)
                row[at:at] = fresh

    def _alternate(self, on: bool) -> None:
        if on and not self.is_alternate:
            self._behind, self._grid = self._grid, self._empty(self.rows)
        elif self.is_alternate and not on:
            fits = len(self._behind) == self.rows and all(len(row) == self.cols for row in self._behind)
            self._grid = self._behind if fits else self._empty(self.rows)
        self.is_alternate = on


class Tty:
    """A process whose controlling terminal is a pseudo-terminal of ours."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], *, rows: int = 24, cols: int = 80) -> None:
        self.master, self.slave = pty.openpty()
        self.screen = Screen(rows, cols)
        self.seen = b""
        self._size(rows, cols)
        self.modes_before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            argv,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env={**env, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509 (one ioctl, no lock)
        )

    def _size(self, rows: int, cols: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def resize(self, rows: int, cols: int) -> None:
        """As a terminal's window does it; the kernel sends SIGWINCH to the foreground group."""
        self.read()
        self.screen.resize(rows, cols)
        self._size(rows, cols)

    def type(self, keys: str | bytes) -> None:
        data = keys.encode() if isinstance(keys, str) else keys
        while data:
            data = data[os.write(self.master, data) :]

    def read(self) -> None:
        """What there is now."""
        while select.select([self.master], [], [], 0)[0]:
            try:
                data = os.read(self.master, 65536)
            except OSError as gone:
                if gone.errno == errno.EIO:
                    return
                raise
            self.seen += data
            self.screen.feed(data)

    def until(self, true: Callable[[], object], what: str = "", seconds: float = 30.0) -> None:
        def look() -> object:
            self.read()
            return true()

        try:
            wait_until(look, seconds, what)
        except AssertionError as late:
            state = f"alive: {self.process.poll() is None}, last bytes: {self.seen[-300:]!r}"
            raise AssertionError(f"{late}\n{state}\n--- screen\n{self.screen.text()}\n---") from None

    def until_shows(self, pattern: str, seconds: float = 30.0) -> re.Match[str]:
        """Until a line of the screen matches."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            found[:] = [match for line in self.screen.lines() if (match := re.search(pattern, line))]
            return bool(found)

        self.until(look, f"the screen shows {pattern!r}", seconds)
        return found[-1]

    def wait(self, seconds: float = 30.0) -> int:
        self.until(lambda: self.process.poll() is not None, "the process ends", seconds)
        return self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGHUP)
            try:
                self.until(lambda: self.process.poll() is not None, seconds=20)
            except AssertionError:
                self.process.kill()
                self.process.wait()
        os.close(self.master)
        os.close(self.slave)

    def __enter__(self) -> Tty:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Shell(Tty):
    """bash on that terminal: a line is typed when its prompt is there."""

    PROMPT = b"\x1b[?2004h"
    """What readline sends once it has the terminal: what is typed between two lines may go to either mode."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__(argv, env)
        self._prompts = self._entered = 0
        self._lines = itertools.count(1)

    def prompt(self, seconds: float = 60.0) -> None:
        """Until there is one more than at the last line."""
        self.until(lambda: self.seen.count(self.PROMPT) > self._prompts, "a prompt", seconds)
        self._prompts = self.seen.count(self.PROMPT)

    def enter(self, line: str) -> None:
        self.prompt()
        self._entered = len(self.seen)
        self.type(f"{line}\r")

    def until_prints(self, pattern: str) -> None:
        """Until what came since the last line was entered has a line that matches."""
        self.until(
            lambda: re.search(rf"[\r\n]{pattern}".encode(), self.seen[self._entered :]), f"{pattern!r} is printed"
        )

    def ask(self, line: str) -> str:
        """What the line printed (its last line)."""
        mark = f"mark{next(self._lines)}"
        self.enter(f"{line} | sed 's/^/{mark}:/'")
        return self.until_shows(rf"^{mark}:(.*)")[1]

    def code(self, line: str) -> int:
        """The line's exit code."""
        mark = f"code{next(self._lines)}"
        self.enter(f"{line}; echo {mark}=$?")
        return int(self.until_shows(rf"^{mark}=(\d+)")[1])

    def press(self, key: str) -> None:
        """A key that ends or stops the foreground job; again if it came before the job was in the foreground."""
        for _ in range(4):
            self.type(key)
            try:
                self.until(lambda: self.seen.count(self.PROMPT) > self._prompts, seconds=3)
            except AssertionError:
                continue
            return
        raise AssertionError(f"{key!r} did not bring the prompt back:\n{self.screen.text()}")


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
