"""Makes the stages of a build: from the last step that the cache knows, in a room that is opened only when a step has to run.

A stage that is only copied from runs only when a COPY that needs it does. Its room stays open for those that copy from it, so that its
files need not become an image first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from cloche.wire.images import ImageEvent
from cloche_server import points
from cloche_server.images.build.copying import Chosen
from cloche_server.images.build.protocols import (
    Base,
    BuildCache,
    Cached,
    Converter,
    LayerRef,
    Room,
    Shelf,
    Workshop,
)
from cloche_server.images.build.result import NO_TIME
from cloche_server.images.build.roomwork import RoomWork, StepLimits
from cloche_server.images.build.sources import Sources, inline, with_files
from cloche_server.images.build.stages import Origin, Plan, Stage
from cloche_server.images.build.steps import CopyWork, Followed, Step

GIB: Final = 1024**3
STEP_CHARS_MAX: Final = 2000


@dataclass(frozen=True)
class BuildLimits:
    """Of one build."""

    memory_bytes: int = 2 * GIB
    disk_bytes: int = 16 * GIB
    copied_bytes: int = 16 * GIB
    """Of one COPY --from, or one archive of ADD."""
    step: StepLimits = field(default_factory=StepLimits)


@dataclass(frozen=True)
class Prepared:
    """All that is known of a stage before it runs."""

    stage: Stage
    base: Base | None
    followed: Followed
    start_key: str
    keys: tuple[str, ...]
    """After each step."""
    chosen: dict[int, Chosen]
    """By step: what a COPY takes from the context."""

    @property
    def final_key(self) -> str:
        return self.keys[-1] if self.keys else self.start_key

    @property
    def changing(self) -> list[int]:
        """The steps that change files."""
        return [number for number, step in enumerate(self.followed.steps) if step.work is not None]


@dataclass(frozen=True)
class Done:
    """A stage that is made."""

    layers: tuple[LayerRef, ...]
    created: str


class Making:
    """What a build does, once it is planned. `closing` ends its rooms."""

    def __init__(
        self,
        order: Plan,
        prepared: Mapping[int, Prepared],
        images: Mapping[str, Base],
        *,
        workshop: Workshop,
        shelf: Shelf,
        converter: Converter,
        cache: BuildCache,
        sources: Sources,
        closing: AsyncExitStack,
        on_event: Callable[[ImageEvent], None],
        limits: BuildLimits,
        use_cache: bool,
    ) -> None:
        self._order = order
        self._prepared = prepared
        self._images = images
        self._workshop = workshop
        self._shelf = shelf
        self._converter = converter
        self._cache = cache
        self._sources = sources
        self._closing = closing
        self._say = on_event
        self._limits = limits
        self._use_cache = use_cache
        self._now = time.time()
        self._done: dict[int, Done] = {}
        self._rooms: dict[Origin, Room] = {}
        places = [(index, number) for index, each in prepared.items() for number in range(len(each.followed.steps))]
        self._numbers = {place: count for count, place in enumerate(places, start=1)}
        self._told: set[tuple[int, int]] = set()
        self._at = 0

    async def make(self, index: int) -> Done:
        """A stage and, as far as needed, those that it is built on or copies from."""
        if index not in self._done:
            self._done[index] = await self._make(self._prepared[index])
        return self._done[index]

    async def _make(self, prepared: Prepared) -> Done:
        hit, known = await self._furthest(prepared)
        created = NO_TIME if known is None else known.created
        layers = await self._base_layers(prepared) if known is None else known.layers
        if prepared.changing and hit == prepared.changing[-1] and prepared.stage.index == self._order.target:
            self.tell_rest(prepared.stage.index)
        work: RoomWork | None = None
        for number, step in enumerate(prepared.followed.steps):
            if number <= hit or step.work is None:
                continue
            # A stage that is copied from may be made here, and told before this one.
            chosen = await self._chosen(prepared, number, step)
            self._tell_cached(prepared, number)
            self._tell(prepared, number, cached=False)
            if work is None:
                work = await self._open(prepared, layers)
            await work.do(step, chosen, self._output)
            if number == prepared.changing[-1] or work.is_worth_saving():
                layers = await work.save()
                created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                await self._cache.put(prepared.keys[number], Cached(layers, created))
                points.reached("images.build.after_step")
        self._tell_cached(prepared, len(prepared.followed.steps))
        if work is not None:
            await self._keep_or_close(prepared.stage.index, work.room)
        return Done(layers, created)

    def tell_rest(self, before: int | None = None) -> None:
        """Steps of stages that nobody had to look into."""
        for index, prepared in self._prepared.items():
            if before is None or index < before:
                self._tell_cached(prepared, len(prepared.followed.steps))

    def _tell_cached(self, prepared: Prepared, before: int) -> None:
        for number in range(before):
            self._tell(prepared, number, cached=True)

    async def _furthest(self, prepared: Prepared) -> tuple[int, Cached | None]:
        for number in reversed(prepared.changing if self._use_cache else []):
            known = await self._cache.get(prepared.keys[number])
            if known is not None:
                return number, known
        return -1, None

    async def _base_layers(self, prepared: Prepared) -> tuple[LayerRef, ...]:
        if prepared.base is not None:
            return prepared.base.layers
        if prepared.stage.base.kind == "stage":
            return (await self.make(prepared.stage.base.stage)).layers
        return ()

    async def _open(self, prepared: Prepared, layers: tuple[LayerRef, ...]) -> RoomWork:
        base = prepared.base
        if base is not None and layers == base.layers:
            room = await self._room(base.root_file)
        else:
            room = await self._room_of(layers)
        return RoomWork(
            room,
            layers,
            shelf=self._shelf,
            converter=self._converter,
            limits=self._limits.step,
            now=self._now,
        )

    async def _room_of(self, layers: tuple[LayerRef, ...]) -> Room:
        return await self._room(await self._shelf.root(layers) if layers else None)

    async def _room(self, root_file: str | None) -> Room:
        limits = self._limits
        room = await self._workshop.open(root_file, disk_bytes=limits.disk_bytes, memory_bytes=limits.memory_bytes)
        self._closing.push_async_callback(room.close)
        return room

    async def _keep_or_close(self, index: int, room: Room) -> None:
        origin = Origin("stage", stage=index)
        if any(origin in each.stage.copies.values() for each in self._prepared.values()):
            self._rooms[origin] = room
        else:
            await room.close()

    async def _chosen(self, prepared: Prepared, number: int, step: Step) -> Chosen | None:
        work = step.work
        if not isinstance(work, CopyWork):
            return None
        origin = prepared.stage.copies.get(work.index)
        if origin is None:
            chosen = prepared.chosen[number]
            if work.is_add:
                chosen = await self._sources.unpacked(chosen, step)
        else:
            chosen = await self._sources.from_room(await self._source_room(origin), work.sources, step)
        return with_files(chosen, inline(work.inline, self._now))

    async def _source_room(self, origin: Origin) -> Room:
        if origin.kind == "stage":
            done = await self.make(origin.stage)
            if origin not in self._rooms:
                self._rooms[origin] = await self._room_of(done.layers)
        elif origin not in self._rooms:
            self._rooms[origin] = await self._room(self._images[origin.image].root_file)
        return self._rooms[origin]

    def _tell(self, prepared: Prepared, number: int, *, cached: bool) -> None:
        place = (prepared.stage.index, number)
        if place in self._told:
            return
        self._told.add(place)
        self._at = self._numbers[place]
        text = prepared.followed.steps[number].text[:STEP_CHARS_MAX]
        self._say(ImageEvent(kind="step", step=text, number=self._at, of=len(self._numbers), cached=cached))

    def _output(self, text: str) -> None:
        self._say(ImageEvent(kind="output", text=text, number=self._at))
