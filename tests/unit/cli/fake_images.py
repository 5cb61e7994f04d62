"""Images of a node that is not there: answers of one's choice, and what was asked."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cloche.wire.errors import error
from cloche.wire.images import (
    FsckProblem,
    FsckReport,
    GcResult,
    ImageConfig,
    ImageEvent,
    ImageView,
    LostOnConversion,
)

DIGEST = "sha256:" + "ab" * 32


def make_view(**fields: Any) -> ImageView:
    plain = {
        "digest": DIGEST,
        "names": ["python:3.12-slim"],
        "platform": "linux/amd64",
        "source": "registry",
        "layers": 4,
        "size_bytes": 41 << 20,
        "root_bytes": 120 << 20,
        "entries": 4242,
        "added_at": 1.0e9,
        "used_at": 1.0e9,
        "config": ImageConfig(cmd=["python3"], env={"PATH": "/usr/bin"}),
    }
    return ImageView(**{**plain, **fields})


def pull_events(name: str, view: ImageView) -> list[ImageEvent]:
    layers = [
        ImageEvent(kind="layer", digest=digest, number=number, of=2, bytes_done=done, bytes_total=1 << 20)
        for number, digest in ((1, "sha256:a"), (2, "sha256:b"))
        for done in (0, 1 << 19, 1 << 20, 1 << 20)
    ]
    return [
        ImageEvent(kind="resolved", image=name, digest=view.digest),
        *layers,
        ImageEvent(kind="convert", bytes_done=1, bytes_total=2),
        ImageEvent(kind="done", image=name, view=view),
    ]


class FakeImages:
    """`views` is what is there; `asked` is what was asked."""

    def __init__(self) -> None:
        self.views = [make_view()]
        self.asked: list[tuple[str, Any]] = []
        self.problems: list[FsckProblem] = []
        self.output = ""

    def _tell(self, on_event: Callable[[ImageEvent], object] | None, events: list[ImageEvent]) -> None:
        for event in events:
            if on_event is not None:
                on_event(event)

    def list(self) -> Any:
        return self.views

    def inspect(self, image: str) -> ImageView:
        if image == "missing":
            raise error("image_not_found", f"There is no image {image!r} here.")
        return self.views[0]

    def pull(self, image: str, *, platform: str | None = None, on_event: Any = None) -> ImageView:
        self.asked.append(("pull", (image, platform)))
        self._tell(on_event, pull_events(image, self.views[0]))
        return self.views[0]

    def import_archive(self, source: Path, *, name: str | None = None, on_event: Any = None) -> Any:
        self.asked.append(("import", (source, name)))
        self._tell(on_event, [ImageEvent(kind="done", view=self.views[0])])
        return self.views

    def export_parts(self, image: str) -> Iterator[bytes]:
        self.asked.append(("export", image))
        yield from (b"tar ", b"bytes")
        if image == "broken":
            raise error("image_corrupt", "A layer is damaged.")

    def build(self, context: Path, *, on_event: Any = None, **fields: Any) -> ImageView:
        self.asked.append(("build", (context, fields)))
        steps = [
            ImageEvent(kind="step", step="FROM python:3.12-slim", number=1, of=2, cached=True),
            ImageEvent(kind="step", step="RUN \x1b]0;make\x07", number=2, of=2),
            ImageEvent(kind="output", text=self.output),
            ImageEvent(kind="done", image="app:1", view=make_view(names=["app:1"], source="build")),
        ]
        self._tell(on_event, steps)
        return make_view(names=["app:1"])

    def remove(self, image: str) -> None:
        self.asked.append(("remove", image))
        if image == "used":
            raise error("image_in_use", "2 sandboxes run from it.")

    def gc(self, *, max_bytes: int | None = None, max_age_s: float | None = None) -> GcResult:
        self.asked.append(("gc", (max_bytes, max_age_s)))
        return GcResult(images=["old:1"], blobs=3, roots=1, bytes=5 << 20)

    def fsck(self, *, repair: bool = False) -> FsckReport:
        problems = [problem.model_copy(update={"repaired": repair}) for problem in self.problems]
        return FsckReport(blobs=3, roots=1, images=1, bytes=5 << 20, problems=problems)


__all__ = ["DIGEST", "FakeImages", "LostOnConversion", "make_view", "pull_events"]
