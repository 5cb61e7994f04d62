"""A backend in memory, for the shape of HTTP only. It runs nothing: a "command" prints what its argv says.

argv: ["print", TEXT] prints and exits 0 · ["exit", N] · ["bulk", BYTES] · ["cat"] echoes stdin · ["ticks", N, SECONDS]
· ["silent", SECONDS] · ["crash"] breaks the backend itself · ["stderr", TEXT]
"""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import AsyncIterator
from typing import Any

from cloche.wire.commands import Command, Cursor, StartCommand, StdinState
from cloche.wire.ends import End, EndReason
from cloche.wire.errors import error
from cloche.wire.files import Entry, EntryList, MakeDirectory, Move, TreeResult, WatchEvent
from cloche.wire.ids import matches_prefix, new_id
from cloche.wire.nodes import DiskUse, EventList, NodeView, Pruned
from cloche.wire.sandboxes import CreateSandbox, Isolation, Limits, Sandbox, SandboxState
from cloche_server.api.backend import Caller, OutputChunk
from tests.unit.api.memory_command import MemoryCommand
from tests.unit.api.memory_egress import MemoryEgress
from tests.unit.api.memory_images import MemoryImages
from tests.unit.api.memory_people import MemoryPeople

BLOCK = 256 * 1024
DEFAULT_IMAGE = "python"


class MemoryBackend(MemoryImages, MemoryEgress, MemoryPeople):
    """Implements `Backend`; attributes such as `readers` show a test what the API did with it."""

    def __init__(self) -> None:
        super().__init__()
        self.sandboxes: dict[str, Sandbox] = {}
        self.commands: dict[str, MemoryCommand] = {}
        self.keys: dict[tuple[str, str], Any] = {}
        self.files: dict[str, bytes] = {}
        self.readers = 0
        self.calls: list[str] = []
        self.asked: list[CreateSandbox] = []
        self.interceptor = "ready"
        self.break_output_after: int | None = None

    def _own(self, caller: Caller, name: str) -> Sandbox:
        found = [
            box
            for box in self.sandboxes.values()
            if (matches_prefix(box.id, name) or box.name == name) and (caller.is_admin or box.owner == caller.owner)
        ]
        if not found:
            raise error("not_found", "No such sandbox.")
        if len(found) > 1:
            raise error("ambiguous", "More than one.")
        return found[0]

    async def create(self, caller: Caller, request: CreateSandbox, idempotency_key: str | None) -> Sandbox:
        if idempotency_key and (caller.owner, idempotency_key) in self.keys:
            return self.sandboxes[self.keys[caller.owner, idempotency_key]]
        if request.image == "crash":
            raise RuntimeError("secret words of the backend")
        if request.image == "full":
            raise error("overloaded", "Too many.", retry_after_s=7)
        self.asked.append(request)
        image = request.image or DEFAULT_IMAGE
        if image.endswith(":absent") and image not in self.images and request.pull == "never":
            raise error("image_not_found", f"There is no image {image!r} here.", detail={"image": image})
        box = Sandbox(
            id=new_id("sandbox"),
            name=request.name,
            tenant=caller.tenant,
            owner=caller.owner,
            lineage=new_id("lineage"),
            image=image,
            image_digest=self.images[image].digest if image in self.images else None,
            state=SandboxState.RUNNING,
            isolation=Isolation.model_validate({"class": "gvisor", "engine": "none", "version": "0", "digest": "0"}),
            limits=request.limits,
            created_at=1.0,
            age_s=0.0,
            ends_in_s=request.ttl_s,
        )
        self.sandboxes[box.id] = box
        if idempotency_key:
            self.keys[caller.owner, idempotency_key] = box.id
        if request.command:
            argv = [*(request.entrypoint or []), *request.command.argv] or ["print", "the image's own"]
            first = StartCommand.model_validate({**request.command.model_dump(), "argv": argv})
            command = await self.start_command(caller, box.id, first, None)
            box.first_command = command.id
        return box

    async def list(self, caller: Caller, *, include_ended: bool, usage: bool) -> list[Sandbox]:
        return [
            box
            for box in self.sandboxes.values()
            if (caller.is_admin or box.owner == caller.owner) and (include_ended or box.ended is None)
        ]

    async def get(self, caller: Caller, sandbox: str) -> Sandbox:
        return self._own(caller, sandbox)

    async def wait_ended(self, caller: Caller, sandbox: str, timeout_s: float) -> Sandbox:
        return self._own(caller, sandbox)

    async def extend(self, caller: Caller, sandbox: str, ttl_s: float) -> Sandbox:
        box = self._own(caller, sandbox)
        box.ends_in_s = ttl_s
        return box

    async def kill(self, caller: Caller, sandbox: str) -> Sandbox:
        box = self._own(caller, sandbox)
        if box.ended is None:
            box.ended = End(reason=EndReason.KILLED, by=caller.owner)
            box.state = SandboxState.ENDED
        for command in self.commands.values():
            if command.sandbox == box.id:
                command.finish(End(reason=EndReason.KILLED, by="sandbox"))
        return box

    async def kill_all(self, caller: Caller) -> int:
        own = [box for box in self.sandboxes.values() if box.owner == caller.owner and box.ended is None]
        for box in own:
            await self.kill(caller, box.id)
        return len(own)

    async def start_command(
        self, caller: Caller, sandbox: str, request: StartCommand, idempotency_key: str | None
    ) -> Command:
        box = self._own(caller, sandbox)
        self.calls.append(f"start {request.argv[0]}")
        if box.ended:
            raise error("sandbox_ended", "It has ended.")
        if request.argv[0] == "crash":
            raise RuntimeError("secret words of the backend")
        if idempotency_key and (box.id, idempotency_key) in self.keys:
            known: MemoryCommand = self.commands[self.keys[box.id, idempotency_key]]
            return known.view()
        command = MemoryCommand(box.id, request)
        self.commands[command.id] = command
        if idempotency_key:
            self.keys[box.id, idempotency_key] = command.id
        command.task = asyncio.ensure_future(command.run())
        return command.view()

    async def list_commands(self, caller: Caller, sandbox: str) -> builtins.list[Command]:
        box = self._own(caller, sandbox)
        return [one.view() for one in self.commands.values() if one.sandbox == box.id]

    def _command(self, caller: Caller, sandbox: str | None, name: str) -> MemoryCommand:
        known = self.commands.get(name)
        if (
            known is not None
            and sandbox == known.sandbox
            and (caller.is_admin or self.sandboxes[sandbox].owner == caller.owner)
        ):
            return known
        boxes = (
            {self._own(caller, sandbox).id}
            if sandbox
            else {box.id for box in self.sandboxes.values() if caller.is_admin or box.owner == caller.owner}
        )
        found = [one for one in self.commands.values() if one.sandbox in boxes and matches_prefix(one.id, name)]
        if not found:
            raise error("not_found", "No such command.")
        return found[0]

    async def get_command(self, caller: Caller, sandbox: str | None, command: str) -> Command:
        return self._command(caller, sandbox, command).view()

    async def wait_command(self, caller: Caller, sandbox: str, command: str, timeout_s: float) -> Command:
        one = self._command(caller, sandbox, command)
        end = time.monotonic() + timeout_s
        while one.ended is None and (left := end - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(one.changed.wait(), left)
            except TimeoutError:
                break
        return one.view()

    async def output(
        self, caller: Caller, sandbox: str, command: str, start: Cursor, *, follow: bool, fd: int | None
    ) -> AsyncIterator[OutputChunk]:
        one = self._command(caller, sandbox, command)
        if start.generation != one.generation:
            raise error("rolled_back", "Another generation.")
        if start.offset > one.size and one.complete:
            raise error("cursor_ahead", "No such offset.")
        self.readers += 1
        at = start.offset
        sent = 0
        try:
            while True:
                for begin, chunk_fd, data in list(one.log):
                    if begin + len(data) <= at:
                        continue
                    view = memoryview(data)
                    for low in range(at - begin, len(data), BLOCK):
                        piece = view[low : low + BLOCK]
                        at = begin + low + len(piece)
                        if fd in (None, chunk_fd):
                            yield OutputChunk(one.generation, begin + low, chunk_fd, piece)
                        sent += len(piece)
                        if self.break_output_after is not None and sent >= self.break_output_after:
                            raise RuntimeError("broken on purpose")
                if (one.complete and at >= one.size) or not follow:
                    return
                await one.changed.wait()
        finally:
            self.readers -= 1

    async def write_stdin(
        self, caller: Caller, sandbox: str, command: str, offset: int, data: AsyncIterator[bytes], *, eof: bool
    ) -> StdinState:
        one = self._command(caller, sandbox, command)
        if not one.request.stdin and one.request.terminal is None:
            raise error("no_stdin", "It has no stdin.")
        async for part in data:
            if offset > len(one.stdin):
                raise error("stdin_offset", "A gap.", detail={"offset": len(one.stdin)})
            fresh = part[len(one.stdin) - offset :]
            one.stdin += fresh
            offset += len(part)
            one.poke()
        if eof:
            one.stdin_closed = True
            one.poke()
        return StdinState(offset=len(one.stdin), closed=one.stdin_closed)

    async def signal(self, caller: Caller, sandbox: str, command: str, signal: int) -> None:
        self._command(caller, sandbox, command).signals.append(signal)

    async def resize(self, caller: Caller, sandbox: str, command: str, rows: int, cols: int) -> None:
        self._command(caller, sandbox, command).resizes.append((rows, cols))

    async def kill_command(self, caller: Caller, sandbox: str, command: str) -> Command:
        one = self._command(caller, sandbox, command)
        one.finish(End(reason=EndReason.KILLED, by=caller.owner))
        return one.view()

    async def read_file(
        self, caller: Caller, sandbox: str, path: str, *, offset: int, length: int | None, user: str | None
    ) -> AsyncIterator[bytes]:
        self._own(caller, sandbox)
        if path not in self.files:
            raise error("path_not_found", "No such file.")
        yield self.files[path][offset : None if length is None else offset + length]

    async def write_file(
        self,
        caller: Caller,
        sandbox: str,
        path: str,
        data: AsyncIterator[bytes],
        *,
        mode: int | None,
        make_parents: bool,
        append: bool,
        user: str | None,
    ) -> int:
        self._own(caller, sandbox)
        body = b"".join([part async for part in data])
        self.files[path] = self.files.get(path, b"") + body if append else body
        return len(body)

    async def stat(self, caller: Caller, sandbox: str, path: str, *, follow: bool, user: str | None) -> Entry:
        self._own(caller, sandbox)
        if path not in self.files:
            raise error("path_not_found", "No such file.")
        return Entry(name=path.rsplit("/", 1)[-1], path=path, type="file", size=len(self.files[path]))

    async def list_files(self, caller: Caller, sandbox: str, path: str, *, depth: int, user: str | None) -> EntryList:
        self._own(caller, sandbox)
        inside = [name for name in self.files if name.startswith(path.rstrip("/") + "/")]
        return EntryList(entries=[await self.stat(caller, sandbox, name, follow=True, user=None) for name in inside])

    async def make_directory(self, caller: Caller, sandbox: str, request: MakeDirectory) -> bool:
        self._own(caller, sandbox)
        return True

    async def move(self, caller: Caller, sandbox: str, request: Move) -> None:
        self._own(caller, sandbox)
        if request.source not in self.files:
            raise error("path_not_found", "No such file.")
        self.files[request.target] = self.files.pop(request.source)

    async def remove(self, caller: Caller, sandbox: str, path: str, *, recursive: bool, user: str | None) -> int:
        self._own(caller, sandbox)
        if self.files.pop(path, None) is None:
            raise error("path_not_found", "No such file.")
        return 1

    async def watch(
        self, caller: Caller, sandbox: str, path: str, *, recursive: bool, user: str | None
    ) -> AsyncIterator[WatchEvent]:
        self._own(caller, sandbox)
        for number in range(3):
            yield WatchEvent(type="created", path=f"{path}/{number}")

    async def read_tree(self, caller: Caller, sandbox: str, path: str, *, user: str | None) -> AsyncIterator[bytes]:
        self._own(caller, sandbox)
        tar = self.files.get("tar:" + path)
        if tar is None:
            raise error("path_not_found", "No such directory.")
        for low in range(0, len(tar), 4096):
            yield tar[low : low + 4096]

    async def write_tree(
        self, caller: Caller, sandbox: str, path: str, data: AsyncIterator[bytes], *, overwrite: bool, user: str | None
    ) -> TreeResult:
        self._own(caller, sandbox)
        self.files["tar:" + path] = b"".join([part async for part in data])
        return TreeResult(files=1)

    async def connect_port(self, caller: Caller, sandbox: str, port: int) -> Any:
        self._own(caller, sandbox)
        if port != 8000:
            raise error("connection_refused", "Nobody listens there.")
        return EchoPort()

    async def node(self, caller: Caller) -> NodeView:
        return NodeView(
            interceptor=self.interceptor,
            version="0",
            mode="user",
            pid=1,
            engines={},
            state_dir="/",
            uptime_s=1.0,
            sandboxes_running=len(self.sandboxes),
            generation=1,
        )

    async def disk_use(self, caller: Caller) -> DiskUse:
        return DiskUse(images_bytes=0, logs_bytes=0, layers_bytes=0, journal_bytes=0, ended_sandboxes=0, free_bytes=1)

    async def prune(self, caller: Caller) -> Pruned:
        return Pruned(sandboxes=0, bytes=0)

    async def events(self, caller: Caller, sandbox: str | None, *, after: int, limit: int) -> EventList:
        return EventList(events=[])


class EchoPort:
    """Says back what it hears; after end of file it says `bye` and ends."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(self) -> bytes:
        return await self.heard.get()

    async def send(self, data: bytes) -> None:
        await self.heard.put(data)

    async def send_eof(self) -> None:
        await self.heard.put(b"bye")
        await self.heard.put(b"")

    async def close(self) -> None:
        return


__all__ = ["EchoPort", "Limits", "MemoryBackend", "MemoryCommand"]
