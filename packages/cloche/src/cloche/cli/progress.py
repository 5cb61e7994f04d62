"""Progress on stderr for what takes more than a second; nothing without a terminal (UX-4)."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from cloche.cli.render import is_terminal

SHOW_AFTER_S: Final = 1.0


@contextlib.contextmanager
def spinning(text: str) -> Iterator[None]:
    """A spinner with `text`, if it takes more than a second."""
    if not is_terminal(sys.stderr):
        yield
        return
    status: list[Any] = []

    def begin() -> None:
        from rich.console import Console

        shown = Console(stderr=True, highlight=False).status(text)
        shown.start()
        status.append(shown)

    timer = threading.Timer(SHOW_AFTER_S, begin)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        for shown in status:
            shown.stop()


@contextlib.contextmanager
def counting(text: str, total_bytes: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar of bytes; call what it yields with each piece's size."""
    if not is_terminal(sys.stderr):
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as bar:
        task = bar.add_task(text, total=total_bytes)
        yield lambda count: bar.update(task, advance=count)
