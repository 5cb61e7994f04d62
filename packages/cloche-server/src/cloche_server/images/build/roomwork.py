"""What is done in one room: the steps of a stage, one after the other, and the layer that they have made so far.

A room's upper layer is everything since its root, so a layer that is saved after a step holds the steps before it too: the last one saved
is the one that counts. Saving costs time in proportion to that layer, so it is done when enough work would be lost without it.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cloche.wire.errors import ClocheError
from cloche_server import points
from cloche_server.images.build import users
from cloche_server.images.build.copying import Chosen, Owner, parents, place, tar_of, target_directory
from cloche_server.images.build.problems import failed, shown
from cloche_server.images.build.protocols import Converter, LayerRef, Room, Shelf
from cloche_server.images.build.steps import CopyWork, DirectoryWork, RunWork, Step
from cloche_server.images.build.tree import Node

SAVE_AFTER_S: Final = 2.0
SAVE_COST_FACTOR: Final = 4.0
"""Work that is not saved may take this many times what the last saving took."""
TAIL_CHARS_MAX: Final = 4096
SCRIPTS: Final = "/dev/shm"
"""Mounted in every room, and not part of its layer."""


@dataclass(frozen=True)
class StepLimits:
    """Of one step."""

    seconds: float = 3600.0
    output_bytes: int = 1024 * 1024


class Output:
    """What a step prints: told as it comes up to a limit; the end is kept for the message when it fails."""

    def __init__(self, say: Callable[[str], None], bytes_max: int) -> None:
        self._say = say
        self._left = bytes_max
        self._decoders = {fd: codecs.getincrementaldecoder("utf-8")("replace") for fd in (1, 2)}
        self.tail = ""

    def take(self, fd: int, data: bytes) -> None:
        text = self._decoders[2 if fd == 2 else 1].decode(data)
        self.tail = (self.tail + text)[-TAIL_CHARS_MAX:]
        if self._left <= 0 or not text:
            return
        self._left -= len(data)
        self._say(text)
        if self._left <= 0:
            self._say("\n[the rest of this step's output is left out]\n")


class RoomWork:
    """One room, from its opening to its end."""

    def __init__(
        self,
        room: Room,
        below: Sequence[LayerRef],
        *,
        shelf: Shelf,
        converter: Converter,
        limits: StepLimits,
        now: float,
    ) -> None:
        self.room = room
        self.layers = tuple(below)
        """As of the last saving."""
        self._below = tuple(below)
        self._shelf = shelf
        self._converter = converter
        self._limits = limits
        self._now = now
        self._unsaved_s = 0.0
        self._last_saving_s = 0.0
        self._directories: set[str] = {"/"}

    async def do(self, step: Step, chosen: Chosen | None, say: Callable[[str], None]) -> None:
        """One step; a ClocheError when it fails. `chosen`: for a COPY."""
        started = time.monotonic()
        try:
            match step.work:
                case RunWork():
                    await self._run(step, step.work, say)
                case CopyWork() if chosen is not None:
                    await self._copy(step, step.work, chosen)
                case DirectoryWork():
                    await self._make(step, step.work.path, await self._owner(step, step.work.user or None))
        except ClocheError as bad:
            if bad.code in ("build_failed", "dockerfile_invalid", "dockerfile_unsupported"):
                raise
            raise failed(step.line, step.text, shown(bad.message, 500), reason=bad.code) from bad
        self._unsaved_s += time.monotonic() - started

    def is_worth_saving(self) -> bool:
        return self._unsaved_s > max(SAVE_AFTER_S, SAVE_COST_FACTOR * self._last_saving_s)

    async def save(self) -> tuple[LayerRef, ...]:
        """All layers now, this room's included, in the store."""
        started = time.monotonic()
        raw, output = self._shelf.temporary(), self._shelf.temporary()
        try:
            await self.room.export(raw)
            points.reached("images.build.after_export")
            os.lseek(raw, 0, os.SEEK_SET)
            made = await self._converter.upper(raw, output, drop=self.room.drop)
            if made.entries:
                layer = await self._shelf.put_layer(output, digest=made.digest, diff_id=made.diff_id, size=made.size)
                self.layers = (*self._below, layer)
            else:
                self.layers = self._below
            points.reached("images.build.after_layer")
        finally:
            os.close(raw)
            os.close(output)
        self._unsaved_s = 0.0
        self._last_saving_s = time.monotonic() - started
        return self.layers

    async def _run(self, step: Step, work: RunWork, say: Callable[[str], None]) -> None:
        await self._make(step, work.workdir, Owner(0, 0))
        argv = work.argv
        if work.script is not None:
            data = work.script.encode("utf-8", "surrogateescape")
            name = f".cloche-run-{step.line}"
            await self.room.put_tree(
                SCRIPTS, tar_of([Node(name, "file", 0o755, 0, 0, self._now, len(data), data=data)])
            )
            argv = (f"{SCRIPTS}/{name}",)
        output = Output(say, self._limits.output_bytes)
        try:
            code = await self.room.run(
                argv,
                env=work.env,
                user=work.user,
                workdir=work.workdir,
                stdin=None,
                on_output=output.take,
                timeout_s=self._limits.seconds,
            )
        except TimeoutError as late:
            text = f"it took longer than {self._limits.seconds:g} s."
            raise failed(step.line, step.text, text, output=output.tail) from late
        if code != 0:
            text = f"exit code {code}."
            raise failed(step.line, step.text, text, exit_code=code, output=output.tail)

    async def _copy(self, step: Step, work: CopyWork, chosen: Chosen) -> None:
        owner = await self._owner(step, work.chown)
        there = await self.room.stat(work.dest)
        if there is not None and there.kind != "dir" and (work.dest.endswith("/") or chosen.has_directory):
            raise failed(step.line, step.text, f"{shown(work.dest, 100)!r} is there and is no directory.")
        is_directory = there is not None and there.kind == "dir"
        if len(chosen.files) > 1 and not is_directory and not work.dest.endswith("/") and not chosen.has_directory:
            raise failed(step.line, step.text, "several files need a destination that ends with '/'.")
        target = target_directory(chosen, work.dest, dest_is_directory=is_directory)
        placed = place(
            chosen,
            work.dest,
            dest_is_directory=is_directory,
            existing=await self._deepest(step, target),
            owner=owner,
            mode=work.mode,
            now=self._now,
        )
        if placed.nodes:
            await self.room.put_tree(placed.base, tar_of(placed.nodes))

    async def _make(self, step: Step, path: str, owner: Owner) -> None:
        """A directory and what it is in, as far as they are missing."""
        if path in self._directories:
            return
        existing = await self._deepest(step, path)
        if existing != path:
            nothing = Chosen((), (), has_directory=True)
            placed = place(
                nothing, path, dest_is_directory=True, existing=existing, owner=owner, mode=None, now=self._now
            )
            await self.room.put_tree(placed.base, tar_of(placed.nodes))
        self._directories.add(path)

    async def _deepest(self, step: Step, path: str) -> str:
        for each in parents(path):
            if each == "/":
                break
            found = await self.room.stat(each)
            if found is not None:
                if found.kind != "dir":
                    raise failed(step.line, step.text, f"{shown(each, 100)!r} is there and is no directory.")
                return each
        return "/"

    async def _owner(self, step: Step, text: str | None) -> Owner:
        if text is None:
            return Owner(None, None)
        passwd, group = b"", b""
        if not all(part.isdecimal() for part in text.split(":")):
            passwd = await self.room.read_file("/etc/passwd", users.FILE_BYTES_MAX) or b""
            group = await self.room.read_file("/etc/group", users.FILE_BYTES_MAX) or b""
        try:
            return Owner(*await asyncio.to_thread(users.resolve, text, passwd, group))
        except users.NoSuchUser as unknown:
            raise failed(step.line, step.text, f"the image has no user {shown(text, 60)!r}.") from unknown
