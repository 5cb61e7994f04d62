"""`cloche approvals watch`: one question at a time, answered by a key; or lines, without a terminal.

A key counts only for a question that has been on the screen for a moment: what was typed at the one before never answers
the next.
"""

import contextlib
import json
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from cloche.cli import units
from cloche.cli.approvals import wish
from cloche.cli.escape import line

if TYPE_CHECKING:
    from cloche.client import Node
    from cloche.wire.approvals import Approval

SETTLE_S: Final = 0.4
POLL_S: Final = 20.0
LOOK_S: Final = 0.5
AGAIN_S: Final = 1.0
WISH_CHARS_MAX: Final = 200
COMMAND_CHARS_MAX: Final = 80

Act = Literal["approve", "deny", "scope", "quit"]
KEYS: Final[dict[str, Act]] = {"a": "approve", "d": "deny", "s": "scope", "q": "quit"}


def sentence(each: "Approval") -> str:
    """`a7f3k2 sk3m9q wants  POST https://…   (203.0.113.7)   asked by `python3 agent.py`, 12 s ago`."""
    from cloche.wire.ids import short

    who = f"asked by `{line(each.command_line, COMMAND_CHARS_MAX)}`, " if each.command_line else "asked "
    address = line(each.address, 60) or "its address is looked up after your answer"
    return (
        f"{line(short(each.id))} {line(short(each.sandbox))} wants  {line(wish(each), WISH_CHARS_MAX)}   ({address})"
        f"   {who}{each.age_s:.0f} s ago"
    )


def choices(each: "Approval") -> str:
    scope = f"   [s] approve for {units.words(each.scope_s_max)}" if each.scope_s_max else ""
    return f"    [a]pprove this one{scope}   [d]eny   [?] why is this asked"


def why(each: "Approval") -> str:
    """For `?`."""
    from cloche.cli.failure import who
    from cloche.wire.ids import short

    command = f" by command {line(short(each.command))}" if each.command else ""
    return (
        f"    rule {line(each.rule, 120)} says ask; asked{command}, for {line(who(each.owner))}; "
        f"denied by itself in {each.ends_in_s:.0f} s"
    )


def outcome(each: "Approval") -> str:
    from cloche.cli.failure import who

    by = f" by {line(who(each.answered_by))}" if each.answered_by else ""
    return f"    {each.state.replace('_', ' ')}{by}"


@dataclass
class Desk:
    """What is on the screen, and what a key does. Pure: it is told the time and answers lines."""

    shown: "Approval | None" = None
    since: float = 0.0
    waiting: "list[Approval]" = field(default_factory=list)

    def look(self, found: "list[Approval]", now: float) -> list[str]:
        """After a change: `found` has those that wait and those that are over."""
        self.waiting = [each for each in found if each.state == "waiting"]
        lines: list[str] = []
        if self.shown is not None:
            same = next((each for each in found if each.id == self.shown.id), None)
            if same is not None and same.state == "waiting":
                self.shown = same
                return lines
            lines.append(outcome(same) if same is not None else "    over")
            self.shown = None
        return [*lines, *self._next(now)]

    def _next(self, now: float) -> list[str]:
        if not self.waiting:
            return []
        self.shown, self.since = self.waiting[0], now
        return [sentence(self.shown), choices(self.shown)]

    def key(self, char: str, now: float) -> tuple[Act | None, list[str]]:
        """What to do about the question that is shown."""
        act = KEYS.get(char.lower())
        if act == "quit":
            return act, []
        if self.shown is None or now - self.since < SETTLE_S:
            return None, []
        if char == "?":
            return None, [why(self.shown)]
        if act == "scope" and not self.shown.scope_s_max:
            return None, ["    the organisation's file allows one action at a time"]
        return act, []


@dataclass
class _Poller:
    """Looks for changes in a thread of its own; wakes the screen by a pipe."""

    found: "queue.SimpleQueue[list[Approval] | Exception]" = field(default_factory=queue.SimpleQueue)
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        from cloche.cli import session
        from cloche.wire.errors import ClocheError

        try:
            with session.connect() as node:
                for found in changes(node, self.stopped):
                    self._put(found)
        except ClocheError as failed:
            self._put(failed)

    def _put(self, item: "list[Approval] | Exception") -> None:
        self.found.put(item)
        with contextlib.suppress(BlockingIOError, OSError):  # it is awake already, or gone
            os.write(self._writer, b"x")


def changes(node: "Node", stopped: threading.Event | None = None) -> "Iterator[list[Approval]]":
    """All that is known, at first and after each change. A node that restarts is waited for."""
    from cloche.wire.errors import ClocheError

    cursor: int | None = None
    while stopped is None or not stopped.is_set():
        try:
            found = node.approvals.changes(cursor, wait_s=0.0 if cursor is None else POLL_S, include_over=True)
        except ClocheError as failed:
            if not failed.kind.retryable or cursor is None:
                raise
            time.sleep(AGAIN_S)
            continue
        if found.cursor != cursor:
            yield found.approvals
        cursor = found.cursor


def in_lines(*, as_json: bool) -> int:
    """One line for each question, and one for what became of it."""
    from cloche.cli import session
    from cloche.wire.ids import short

    states: dict[str, str] = {}
    with session.connect() as node:
        for found in changes(node):
            for each in found:
                if states.get(each.id) == each.state or (not states.get(each.id) and each.state != "waiting"):
                    continue
                states[each.id] = each.state
                if as_json:
                    text = json.dumps(each.model_dump(mode="json"), ensure_ascii=True)
                elif each.state == "waiting":
                    text = sentence(each)
                else:
                    text = f"{line(short(each.id))}{outcome(each)[3:]}"
                print(text, flush=True)
            kept = {each.id for each in found}
            states = {name: state for name, state in states.items() if name in kept}
    return 0


def at_terminal() -> int:
    from cloche.cli import render, session

    poller = _Poller()
    thread = threading.Thread(target=poller.run, name="approvals", daemon=True)
    thread.start()
    render.say("waiting for questions; q or Ctrl-C ends this")
    try:
        with session.connect() as node, _keys_at_once(sys.stdin.fileno()):
            return _serve(node, poller)
    finally:
        poller.stopped.set()


def _serve(node: "Node", poller: _Poller) -> int:
    desk, keyboard = Desk(), sys.stdin.fileno()
    while True:
        ready, _, _ = select.select([keyboard, poller.reader], [], [], LOOK_S)
        if poller.reader in ready:
            os.read(poller.reader, 4096)
            while not poller.found.empty():
                item = poller.found.get()
                if isinstance(item, Exception):
                    raise item
                _show(desk.look(item, time.monotonic()))
        if keyboard in ready:
            typed = os.read(keyboard, 1).decode("ascii", "replace")
            act, lines = ("quit", []) if typed == "" else desk.key(typed, time.monotonic())
            _show(lines)
            if act == "quit":
                return 0
            if act is not None:
                _answer(node, desk, act)


def _answer(node: "Node", desk: Desk, act: Act) -> None:
    """The change comes back by the poller, which then shows the next."""
    from cloche.cli.failure import show_error
    from cloche.wire.errors import ClocheError

    assert desk.shown is not None
    asked, since = desk.shown, desk.since
    desk.since = float("inf")  # no second key for the same question
    try:
        if act == "deny":
            node.approvals.deny(asked.id)
        else:
            node.approvals.approve(asked.id, scope_s=asked.scope_s_max if act == "scope" else None)
    except ClocheError as error:
        show_error(error)
        if error.code != "approval_over":
            desk.since = since


def _show(lines: list[str]) -> None:
    for text in lines:
        print(text, flush=True)


@contextlib.contextmanager
def _keys_at_once(fd: int) -> "Iterator[None]":
    """Keys come one by one and are not echoed; Ctrl-C still works; the terminal is given back as it was."""
    import termios
    import tty

    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd, termios.TCSADRAIN)
        termios.tcflush(fd, termios.TCIFLUSH)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
