"""The events of a pull, an import or a build, read from a stream. Pure."""

from __future__ import annotations

from pydantic import ValidationError

from cloche.client._stream import EventParser
from cloche.wire.errors import Problem, error, from_problem
from cloche.wire.images import ImageEvent, ImageView


class ImageReader:
    """Bytes to events; `views` are the images that are done. A problem in the stream is raised."""

    def __init__(self) -> None:
        self.views: list[ImageView] = []
        self._parser = EventParser()

    def feed(self, data: bytes) -> list[ImageEvent]:
        events = []
        for event in self._parser.feed(data):
            try:
                if event.name == "error":
                    raise from_problem(Problem.model_validate_json(event.data))
                if event.name != "image":
                    continue  # a name that a newer node has
                read = ImageEvent.model_validate_json(event.data)
            except ValidationError as raised:
                raise error("internal", "The node sent an event that can't be read (ValidationError).") from raised
            if read.kind == "done" and read.view is not None:
                self.views.append(read.view)
            events.append(read)
        return events

    def finish(self) -> list[ImageView]:
        if not self.views:
            raise error("node_unavailable", "The node ended the answer before the image was there.", fix="Try again.")
        return self.views
