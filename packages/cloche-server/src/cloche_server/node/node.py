"""`Node`: the Backend of one machine. Thin: it finds the sandbox, says that it is in use, and calls the room's parts."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cloche.wire.commands import Command, Cursor, StartCommand, StdinState
from cloche.wire.errors import ClocheError, error
from cloche.wire.nodes import DiskUse, Event, EventList, NodeView, Pruned
from cloche.wire.sandboxes import CreateSandbox, SandboxState
from cloche.wire.sandboxes import Sandbox as View
from cloche_server.api.backend import Caller, OutputChunk
from cloche_server.channel import Budget
from cloche_server.engines.contract import Engine
from cloche_server.images.service import Images
from cloche_server.images.worker import Converter
from cloche_server.node import admission, shelf, start, usage, workshop
from cloche_server.node.admission import Use, Watermarks
from cloche_server.node.approving import Approving, open_approvals
from cloche_server.node.clock import NS, Clock, SystemClock, boot_id
from cloche_server.node.command import RunningCommand
from cloche_server.node.context import Context
from cloche_server.node.filing import Filing
from cloche_server.node.imaging import Imaging
from cloche_server.node.journal import Journal
from cloche_server.node.keeping import Agenda
from cloche_server.node.lifecycle import Cause, Why
from cloche_server.node.making import Maker
from cloche_server.node.outgoing import Outgoing
from cloche_server.node.records import CommandRecord, SandboxRecord, sandbox_view
from cloche_server.node.retention import Leaks, Retention, leaks
from cloche_server.node.roster import Roster, may_see
from cloche_server.node.sandbox import Sandbox
from cloche_server.node.secreting import Secreting, open_secrets
from cloche_server.node.stock import Stock, bytes_of, open_images
from cloche_server.node.store import Store
from cloche_server.node.way import stored_view
from cloche_server.node.ways import FILE as POLICY_FILE
from cloche_server.node.ways import Interception, NoInterception, PolicyFile, Ways, webhook_of
from cloche_server.secrets.service import Secrets

VERSION: Final = "0.1.0"
Views = list[View]
Commands = list[Command]
Events = list[Event]
Channels = Callable[[], Mapping[str, socket.socket]]
"""A class with a method `list` cannot say `list[…]`."""
WINDOWS_BYTES_MAX: Final = 512 * 1024 * 1024
KILL_S_MAX: Final = 60.0
STOP_S: Final = 5.0
EVENTS_MAX: Final = 1000


@dataclass(frozen=True)
class Config:
    """What a node is told by whoever starts it."""

    state_dir: Path
    images_dir: Path
    layers_dir: Path | None = None
    mode: str = "user"
    accepted: tuple[str, ...] = ()
    keeper_pid: Callable[[], int | None] = lambda: None
    """Asked each time: a keeper can be replaced."""
    cgroup: str | None = None
    marks: Watermarks = field(default_factory=Watermarks)
    config_dir: Path | None = None
    """The operator's own files. None: none."""
    interception: Callable[[Secrets, PolicyFile, Channels], Interception] | None = None
    """Makes what looks into connections. None: a node that refuses what needs it."""
    stock: Stock | None = None
    """None: a store in the state directory, and no converter."""


class Node(Imaging, Filing, Outgoing, Secreting, Approving):
    """Implements `api.backend.Backend`."""

    def __init__(self, config: Config, engines: Mapping[str, Engine], clock: Clock | None = None) -> None:
        self.config = config
        self.engines = engines
        self.roster = Roster()
        store = Store(config.state_dir)
        clock = clock or SystemClock()
        journal = Journal(store.journal_dir, clock, carry=lambda: start.carried(self.roster))
        self.context = Context(clock, journal, store, Agenda(clock), Budget(WINDOWS_BYTES_MAX))
        self._let_out()
        self.retention = Retention(self.context, self.roster)
        self._stock = config.stock or Stock(config.images_dir, config.state_dir / "images")
        self._images: Images | None = None
        self._started_ns = clock.boot_ns()
        self._boot_id = boot_id()
        self._maker = Maker(
            self.context,
            self.roster,
            lambda: self.images,
            lambda: self._stock.default_image,
            engines,
            config.marks,
            self._use,
            self.retention.sandbox_ended,
            self._boot_id,
        )
        self._converter = Converter(self._stock.start)
        self._builds = workshop.Builds(self._maker, self._converter, lambda: admission.disk_free(config.state_dir))

    def _let_out(self) -> None:
        """Who serves every gate; before the first sandbox is made or adopted."""
        config = self.config
        directory = config.config_dir or config.state_dir / "config"  # the latter in tests: keys belong elsewhere
        file = PolicyFile(directory / POLICY_FILE)
        self.secrets = open_secrets(self.context, config.state_dir, directory / "keys")
        self.approvals = open_approvals(
            self.context,
            scope_s_max=lambda: file.organisation.approval_scope_s_max,
            webhook=lambda: webhook_of(file.organisation),
        )
        interception = (
            config.interception(self.secrets, file, self.channels)
            if config.interception is not None
            else NoInterception()
        )
        self.context.ways = Ways(
            self.context, file, secrets=self.secrets, approvals=self.approvals, interception=interception
        )

    async def start(self) -> None:
        """Adopts what lives, ends what does not. Before it returns no request may be served; it waits a bounded time."""
        self._images = await open_images(self._stock, self._converter, self._roots_in_use)
        await start.start(self.context, self.roster, self.retention, self.engines, self._boot_id)
        self.context.ways.adopted({each.record.lineage for each in self.roster.live.values()})
        workshop.end_leftovers(self.roster)

    @property
    def images(self) -> Images:
        assert self._images is not None, "the node was not started"
        return self._images

    def _roots_in_use(self) -> Iterable[str]:
        """Of every sandbox that lives; when the store is opened, of every one that has no end yet."""
        if self._images is not None:
            return [each.record.image_file for each in self.roster.live.values()]
        records = (self.context.store.sandbox(name) for name in self.context.store.sandboxes())
        return [record.image_file for record in records if record is not None and not record.end]

    async def stop(self) -> None:
        """Lets go: every sandbox that runs lives on, and the next daemon adopts it, also one that this one has not reached."""
        await self.images.close()
        await start.stop(self.roster)
        making = [each for each in self.roster.live.values() if each.state is SandboxState.CREATING]
        for each in making:
            each.end(Cause(Why.CREATE_FAILED, detail="the daemon is stopping"))
        ending = [each.ended for each in self.roster.live.values() if each.state is SandboxState.ENDING]
        if ending:
            await asyncio.wait(ending, timeout=STOP_S)
        self.context.agenda.stop()
        for each in list(self.roster.live.values()):
            if each.channel is not None:
                each.channel.close("stopping")
        await self.context.ways.close()
        for task in list(self.context.tasks):
            task.cancel()
        self.context.journal.write("node.stopped", detail={"pid": os.getpid()})
        self.context.journal.close()

    def read_policy(self) -> None:
        """At SIGHUP; a create looks for itself."""
        self.context.spawn(self._read_policy(), "read the policy")

    async def _read_policy(self) -> None:
        """A file that is wrong changes nothing, and is told."""
        try:
            await self.context.ways.file.current()
        except ClocheError as bad:
            self.context.log.error("the organisation's file", code=bad.code, message=bad.message)

    def channels(self) -> Mapping[str, socket.socket]:
        """The daemon's copies, for a keeper's successor."""
        return {each.id: each.instance.channel for each in self.roster.live.values() if each.instance is not None}

    def leaks(self, *, engines: set[str], cgroups: set[str]) -> Leaks:
        """What the keeper, the cgroups and the store hold beyond what this node knows of."""
        live = set(self.roster.live)
        known = live | set(self.roster.ended)
        return leaks(
            directories=set(self.context.store.sandboxes()), known=known, cgroups=cgroups, engines=engines, live=live
        )

    # --- sandboxes ----------------------------------------------------------------------------------

    async def create(self, caller: Caller, request: CreateSandbox, idempotency_key: str | None) -> View:
        return self._view(await self._maker.create(caller, request, idempotency_key))

    async def list(self, caller: Caller, *, include_ended: bool, usage: bool) -> Views:
        found = sorted(self.roster.visible(caller, ended=include_ended), key=_created, reverse=True)
        return await self._views(found) if usage else [self._view(each) for each in found]

    async def _views(self, found: Iterable[Sandbox | SandboxRecord]) -> Views:
        live = [each for each in found if isinstance(each, Sandbox)]
        now_ns = self.context.clock.boot_ns()
        used = dict(
            zip(
                (each.id for each in live),
                await asyncio.gather(*(usage.of(each, now_ns) for each in live)),
                strict=True,
            )
        )
        return [each.view(used[each.id]) if isinstance(each, Sandbox) else self._view(each) for each in found]

    async def get(self, caller: Caller, sandbox: str) -> View:
        return self._view(self.roster.find(caller, sandbox))

    async def wait_ended(self, caller: Caller, sandbox: str, timeout_s: float) -> View:
        found = self.roster.find(caller, sandbox)
        if isinstance(found, Sandbox):
            await asyncio.wait([found.ended], timeout=timeout_s)
        return self._view(found)

    async def extend(self, caller: Caller, sandbox: str, ttl_s: float) -> View:
        found = self._live(caller, sandbox)
        found.extend(ttl_s)
        return found.view()

    async def kill(self, caller: Caller, sandbox: str) -> View:
        found = self.roster.find(caller, sandbox)
        if isinstance(found, Sandbox):
            await self._kill(caller, found)
        return self._view(found)

    async def kill_all(self, caller: Caller) -> int:
        live = [each for each in self.roster.visible(caller, ended=False) if isinstance(each, Sandbox)]
        await asyncio.gather(*(self._kill(caller, each) for each in live))
        return len(live)

    async def _kill(self, caller: Caller, sandbox: Sandbox) -> None:
        sandbox.end(Cause(Why.KILLED, by=caller.owner))
        done, _ = await asyncio.wait([sandbox.ended], timeout=KILL_S_MAX)
        if not done:
            raise error(
                "time_out", f"Not everything of {sandbox.id} is gone after {KILL_S_MAX:g} s; it is tried again."
            )

    # --- commands -----------------------------------------------------------------------------------

    async def start_command(
        self, caller: Caller, sandbox: str, request: StartCommand, idempotency_key: str | None
    ) -> Command:
        found = self._live(caller, sandbox)
        async with found.call():
            return shelf.view(found.start_command(request, idempotency_key))

    async def list_commands(self, caller: Caller, sandbox: str) -> Commands:
        return shelf.all_of(self.context.store, self.roster.find(caller, sandbox))

    async def get_command(self, caller: Caller, sandbox: str | None, command: str) -> Command:
        if sandbox is not None:
            return shelf.view(self._command(caller, sandbox, command))
        return shelf.view(shelf.find_anywhere(self.context.store, self.roster.visible(caller), command))

    async def wait_command(self, caller: Caller, sandbox: str, command: str, timeout_s: float) -> Command:
        found = self._command(caller, sandbox, command)
        if isinstance(found, RunningCommand) and not found.ended.done():
            await asyncio.wait([found.ended], timeout=timeout_s)
        return shelf.view(found)

    async def output(
        self, caller: Caller, sandbox: str, command: str, start: Cursor, *, follow: bool, fd: int | None
    ) -> AsyncIterator[OutputChunk]:
        log = shelf.open_log(self.context.store, self._command(caller, sandbox, command))
        async for chunk in shelf.read(log, start, follow=follow, fd=fd):
            yield chunk

    async def write_stdin(
        self, caller: Caller, sandbox: str, command: str, offset: int, data: AsyncIterator[bytes], *, eof: bool
    ) -> StdinState:
        running = self._running(caller, sandbox, command)
        async with self._live(caller, sandbox).call():
            return await running.write_stdin(offset, data, eof=eof)

    async def signal(self, caller: Caller, sandbox: str, command: str, signal: int) -> None:
        running = self._running(caller, sandbox, command)
        async with self._live(caller, sandbox).call():
            running.signal(signal)

    async def resize(self, caller: Caller, sandbox: str, command: str, rows: int, cols: int) -> None:
        running = self._running(caller, sandbox, command)
        async with self._live(caller, sandbox).call():
            running.resize(rows, cols)

    async def kill_command(self, caller: Caller, sandbox: str, command: str) -> Command:
        found = self._command(caller, sandbox, command)
        return shelf.view(found) if isinstance(found, CommandRecord) else await found.kill(caller.owner)

    # --- the node -----------------------------------------------------------------------------------

    async def node(self, caller: Caller) -> NodeView:
        context = self.context
        return NodeView(
            version=VERSION,
            mode=self.config.mode,
            pid=os.getpid(),
            keeper_pid=self.config.keeper_pid(),
            engines={name: engine.version for name, engine in self.engines.items()},
            accepted=[*self.config.accepted],
            cgroup=self.config.cgroup,
            state_dir=str(self.config.state_dir),
            default_image=self._stock.default_image,
            interceptor=context.ways.interceptor(),
            uptime_s=(context.clock.boot_ns() - self._started_ns) / NS,
            sandboxes_running=len(self.roster.live),
            generation=context.store.generation,
        )

    async def disk_use(self, caller: Caller) -> DiskUse:
        layers = self.config.layers_dir
        logs, layer_bytes, images = await asyncio.to_thread(
            lambda: (self.context.store.log_bytes(), usage.bytes_below(layers), bytes_of(self._stock, self.images))
        )
        return DiskUse(
            images_bytes=images,
            logs_bytes=logs,
            layers_bytes=layer_bytes,
            journal_bytes=self.context.journal.size_bytes,
            ended_sandboxes=len(self.roster.ended),
            free_bytes=admission.disk_free(self.config.state_dir),
        )

    async def prune(self, caller: Caller) -> Pruned:
        return self.retention.prune([each for each in self.roster.visible(caller) if isinstance(each, SandboxRecord)])

    async def events(self, caller: Caller, sandbox: str | None, *, after: int, limit: int) -> EventList:
        wanted = None if sandbox is None else _record(self.roster.find(caller, sandbox)).id
        return EventList(events=await asyncio.to_thread(self._events, caller, wanted, after, min(limit, EVENTS_MAX)))

    def _events(self, caller: Caller, wanted: str | None, after: int, limit: int) -> Events:
        found: Events = []
        for line in self.context.journal.read(after):
            if len(found) >= limit:
                break
            if may_see(caller, line.owner, line.tenant) and wanted in (None, line.sandbox):
                at, detail = line.wall, line.detail
                found.append(
                    Event(
                        seq=line.seq, at=at, kind=line.kind, sandbox=line.sandbox, command=line.command, detail=detail
                    )
                )
        return found

    # --- finding ------------------------------------------------------------------------------------

    def _live(self, caller: Caller, sandbox: str) -> Sandbox:
        found = self.roster.find(caller, sandbox)
        if isinstance(found, SandboxRecord):
            reason = (found.end or {}).get("reason", "")
            raise error("sandbox_ended", f"Sandbox {found.id} has ended ({reason}).", detail={"end": found.end or {}})
        return found

    def _command(self, caller: Caller, sandbox: str, command: str) -> RunningCommand | CommandRecord:
        return shelf.find(self.context.store, self.roster.find(caller, sandbox), command)

    def _running(self, caller: Caller, sandbox: str, command: str) -> RunningCommand:
        found = self._command(caller, sandbox, command)
        if isinstance(found, CommandRecord):
            raise error("command_ended", "The command has ended.", detail={"stdin_offset": found.stdin_offset})
        return found

    def _view(self, found: Sandbox | SandboxRecord) -> View:
        if isinstance(found, Sandbox):
            return found.view()
        now_ns = self.context.clock.boot_ns()
        return sandbox_view(found, SandboxState.ENDED, now_ns=now_ns, egress=stored_view(found))

    def _use(self) -> Use:
        live = [each.record.limits for each in self.roster.live.values()]
        used, most = admission.descriptors()
        return Use(
            sandboxes=len(live),
            disk_free_bytes=admission.disk_free(self.config.state_dir),
            disk_reserved_bytes=sum(limits["disk_bytes"] for limits in live),
            memory_free_bytes=admission.memory_free(),
            descriptors_used=used,
            descriptors_max=most,
            log_bytes=self.retention.log_bytes,
        )


def _record(found: Sandbox | SandboxRecord) -> SandboxRecord:
    return found.record if isinstance(found, Sandbox) else found


def _created(found: Sandbox | SandboxRecord) -> float:
    return _record(found).created_at
