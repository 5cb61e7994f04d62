# Made by tools/unasync.py from packages/cloche/src/cloche/client/_async/images.py: edit that one.
"""Images: what is there, pulling, importing, exporting and building."""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cloche.client._context import BuildContext, archive_parts
from cloche.client._credentials import may_carry, saved_credentials
from cloche.client._image_events import ImageReader
from cloche.client._requests import read_model, request_body
from cloche.client._sync.transport import STREAM_SILENCE_S, Content, Lost, Transport
from cloche.wire.egress import Asked
from cloche.wire.images import (
    BuildOptions,
    Credentials,
    FsckReport,
    GcImages,
    GcResult,
    ImageEvent,
    ImageList,
    ImageView,
    PullImage,
)

OnEvent = Callable[[ImageEvent], object]
STORE_S: Final = 3600.0
"""How long a look at the whole store may take."""
_PATH: Final = "/v1/images"
_TAR: Final = "application/x-tar"


class Images:
    """The images of a node. `on_event` is called with each step, for what takes long."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> builtins.list[ImageView]:
        """Those that you may use."""
        return read_model(ImageList, (self._transport.request("GET", _PATH)).body).images

    def inspect(self, image: str) -> ImageView:
        """By name, or by digest."""
        answer = self._transport.request("GET", f"{_PATH}/inspect", query={"image": image})
        return read_model(ImageView, answer.body)

    def pull(
        self,
        image: str,
        *,
        platform: str | None = None,
        credentials: Credentials | None = None,
        on_event: OnEvent | None = None,
    ) -> ImageView:
        """From its registry. Without `credentials` those that you have from `docker login` or `podman login` are sent."""
        if credentials is None and may_carry(self._transport.target):
            credentials = saved_credentials(image)
        body = request_body(PullImage, image=image, platform=platform, credentials=credentials)
        return (self._follow("pull", {}, body, "application/json", on_event))[-1]

    def import_archive(
        self, source: Path | str, *, name: str | None = None, on_event: OnEvent | None = None
    ) -> builtins.list[ImageView]:
        """From a file of `docker save`, an OCI archive, or a directory with an OCI layout."""
        parts = _in_turn(archive_parts(Path(source)))
        return self._follow("import", {"name": name}, parts, _TAR, on_event)

    def export_parts(self, image: str) -> Iterator[bytes]:
        """An OCI archive (a tar), piece by piece."""
        try:
            with self._transport.stream("GET", f"{_PATH}/export", query={"image": image}) as answer:
                yield from answer.parts
        except Lost as lost:
            raise lost.failure from lost.__cause__

    def build(
        self,
        context: Path | str,
        *,
        name: str | None = None,
        dockerfile: Path | str | None = None,
        args: Mapping[str, str] | None = None,
        target: str | None = None,
        no_cache: bool = False,
        compat: bool = False,
        memory_bytes: int | None = None,
        disk_bytes: int | None = None,
        egress: Sequence[Asked] = (),
        on_event: OnEvent | None = None,
    ) -> ImageView:
        """From a Dockerfile, each step in a sandbox. `dockerfile` None: the one in the context.

        `egress` is what RUN steps may reach, as for a sandbox; without it, nothing.
        """
        packed = BuildContext(Path(context), None if dockerfile is None else Path(dockerfile))
        fields: dict[str, Any] = {"name": name, "dockerfile": packed.dockerfile, "args": dict(args or {})}
        fields |= {"target": target, "no_cache": no_cache, "compat": compat}
        fields |= {"memory_bytes": memory_bytes, "disk_bytes": disk_bytes, "egress": builtins.list(egress)}
        options = request_body(BuildOptions, **fields).decode()
        return (self._follow("build", {"options": options}, _in_turn(packed.blocks()), _TAR, on_event))[-1]

    def remove(self, image: str) -> ImageView:
        """A name; by digest, the image with all your names of it. Answers what it was."""
        answer = self._transport.request("DELETE", _PATH, query={"image": image}, may_repeat=False)
        return read_model(ImageView, answer.body)

    def gc(self, *, max_bytes: int | None = None, max_age_s: float | None = None) -> GcResult:
        """Removes what nobody uses. For the node's administrator."""
        body = request_body(GcImages, max_bytes=max_bytes, max_age_s=max_age_s)
        answer = self._transport.request("POST", f"{_PATH}/gc", content=body, timeout_s=STORE_S)
        return read_model(GcResult, answer.body)

    def fsck(self, *, repair: bool = False) -> FsckReport:
        """Compares the whole store with its hashes; `repair` removes what is broken."""
        answer = self._transport.request("POST", f"{_PATH}/fsck", query={"repair": repair}, timeout_s=STORE_S)
        return read_model(FsckReport, answer.body)

    def _follow(
        self, verb: str, query: Mapping[str, Any], content: Content, content_type: str, on_event: OnEvent | None
    ) -> builtins.list[ImageView]:
        """To the last event. A pull whose connection was lost is asked for again: what is there is not fetched twice."""
        headers = {"accept": "text/event-stream", "content-type": content_type}
        patience = self._transport.patience()
        while True:
            reader = ImageReader()
            try:
                with self._transport.stream(
                    "POST", f"{_PATH}/{verb}", query=query, content=content, headers=headers, timeout_s=STREAM_SILENCE_S
                ) as answer:
                    for part in answer.parts:
                        for event in reader.feed(part):
                            patience.progressed()
                            if on_event is not None:
                                on_event(event)
                return reader.finish()
            except Lost as lost:
                if not isinstance(content, bytes) or lost.failure.code == "time_out":
                    raise lost.failure from lost.__cause__
                time.sleep(patience.delay_s(lost.failure))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._transport.target}>"


def _in_turn(blocks: Iterator[bytes]) -> Iterator[bytes]:
    while (block := next(blocks, None)) is not None:
        yield block
