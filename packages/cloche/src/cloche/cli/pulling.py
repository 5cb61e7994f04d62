"""How a pull or a build goes on, for a person: a bar on a terminal, plain lines elsewhere. On stderr, and escaped."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cloche.cli import render, units
from cloche.cli.escape import StreamEscaper, line

if TYPE_CHECKING:
    from cloche.wire.images import ImageEvent, ImageView

Show = Callable[["ImageEvent"], None]


@dataclass
class Layers:
    """What is known of the layers so far; pure."""

    total: dict[str, int] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    count: int | None = None

    def note(self, event: "ImageEvent") -> bool:
        """True when this event finished a layer."""
        key = event.digest or str(event.number)
        before = self.done.get(key)
        self.count = event.of or self.count
        self.total[key] = event.bytes_total or self.total.get(key, 0)
        self.done[key] = max(before or 0, event.bytes_done or 0)
        is_whole = self.done[key] >= self.total[key]
        return is_whole and (before is None or before < self.total[key])

    @property
    def bytes_done(self) -> int:
        return sum(self.done.values())

    @property
    def bytes_total(self) -> int:
        return sum(self.total.values())

    @property
    def finished(self) -> int:
        return sum(1 for key, total in self.total.items() if self.done[key] >= total)

    @property
    def text(self) -> str:
        return f"{self.finished}/{self.count or len(self.total)} layers"


@contextlib.contextmanager
def showing(image: str, *, steps: bool = False) -> Iterator[Show]:
    """What it yields takes the events. `steps`: without a terminal, a line for each layer; else only the last line."""
    if render.is_terminal(sys.stderr):
        with _bar(image) as show:
            yield show
        return
    layers = Layers()

    def plain(event: "ImageEvent") -> None:
        if event.kind == "done":
            _done(image, event.view)
        elif steps and event.kind == "resolved":
            render.say(f"{line(image, 200)}: {line(event.digest or '', 80)}")
        elif steps and event.kind == "layer" and layers.note(event):
            render.say(f"{line(image, 200)}: {layers.text}, {units.size(layers.bytes_done)}")

    yield plain


@contextlib.contextmanager
def _bar(image: str) -> Iterator[Show]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TextColumn("{task.fields[layers]}"),
    )
    name = escape(line(image, 80))
    layers = Layers()
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as bar:
        task = bar.add_task(f"image {name}", total=None, layers="")
        converting: list[Any] = []

        def show(event: "ImageEvent") -> None:
            if event.kind == "layer":
                layers.note(event)
                bar.update(task, completed=layers.bytes_done, total=layers.bytes_total or None, layers=layers.text)
            elif event.kind == "convert":
                if not converting:
                    converting.append(bar.add_task("making its root file system", total=None, layers=""))
                text = f"{event.number}/{event.of} layers" if event.number and event.of else ""
                bar.update(converting[0], completed=event.bytes_done or 0, total=event.bytes_total, layers=text)
            elif event.kind == "done":
                bar.stop()
                _done(image, event.view)

        yield show


def _done(image: str, view: "ImageView | None") -> None:
    name = view.names[0] if view is not None and view.names and image not in view.names else image
    render.tick(f"image {name}  {units.size(view.size_bytes)}" if view is not None else f"image {name}")


@contextlib.contextmanager
def building(*, quiet: bool = False) -> Iterator[Show]:
    """Each step as a line, and what it prints, escaped."""
    if quiet:
        yield lambda _event: None
        return
    escaper = StreamEscaper()
    pulls = Layers()
    unfinished = False

    def show(event: "ImageEvent") -> None:
        nonlocal unfinished
        if event.kind == "output":
            shown = escaper.feed((event.text or "").encode("utf-8", "surrogateescape"))
            unfinished = not shown.endswith("\n") if shown else unfinished
            sys.stderr.write(shown)
            sys.stderr.flush()
            return
        if unfinished:
            render.say("")
            unfinished = False
        if event.kind == "step":
            cached = "  (cached)" if event.cached else ""
            head = render.styled(f"[{event.number}/{event.of}]", "1", sys.stderr)
            render.say(f"{head} {line((event.step or '').rstrip(), 400)}{cached}")
        elif event.kind == "layer" and pulls.note(event):
            render.say(f"  {pulls.text}, {units.size(pulls.bytes_done)}")
        elif event.kind == "done":
            names = event.view.names if event.view else []
            _done(event.image or (names[0] if names else "without a name"), event.view)

    try:
        yield show
    finally:
        sys.stderr.write(escaper.feed(b"", final=True))
        if unfinished:
            render.say("")
