"""While a command runs at a terminal: says that something of it waits for a person. Else nobody knows why nothing happens."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cloche.cli import render

if TYPE_CHECKING:
    from cloche.client import Sandbox
    from cloche.wire.approvals import Approval


@contextlib.contextmanager
def telling(box: "Sandbox") -> Iterator[None]:
    """Only where a rule of the sandbox asks, and only on a terminal: elsewhere stderr is the command's alone."""
    asks = any(rule.partition(": ")[2].startswith("ask ") for rule in box.view.egress.rules)
    if not asks or not render.is_terminal(sys.stderr):
        yield
        return
    stopped = threading.Event()
    threading.Thread(target=_tell, args=(box.id, stopped), name="questions", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()


def _tell(sandbox: str, stopped: threading.Event) -> None:
    from cloche.cli import session
    from cloche.cli.watching import changes
    from cloche.wire.errors import ClocheError

    told: set[str] = set()
    try:
        with session.connect() as node:
            for found in changes(node, stopped):
                for each in found:
                    if each.sandbox == sandbox and each.state == "waiting" and each.id not in told:
                        told.add(each.id)
                        render.say(notice(each))
    except ClocheError:  # the command has the same node, and tells what is wrong with it
        return


def notice(each: "Approval") -> str:
    from cloche.cli.approvals import wish
    from cloche.cli.escape import line

    return f"… {line(wish(each), 120)} waits for an approval: cloche approvals watch (in another terminal)"
