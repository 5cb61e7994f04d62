"""One live sandbox: its instance, its channel, its running commands, its times, and its one end."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from cloche.wire.commands import StartCommand
from cloche.wire.ends import End
from cloche.wire.errors import ClocheError, error
from cloche.wire.ids import new_id
from cloche.wire.sandboxes import Sandbox as View
from cloche.wire.sandboxes import SandboxState, Usage
from cloche_server import points
from cloche_server.channel import Channel, JsonObject
from cloche_server.channel.streams import STREAMS_PER_OPENER_MAX
from cloche_server.engines.contract import EngineError, Instance
from cloche_server.node import lifecycle
from cloche_server.node.command import RunningCommand, check_size
from cloche_server.node.command_log import CommandLog
from cloche_server.node.context import Context
from cloche_server.node.guest_text import escaped
from cloche_server.node.keeping import Entry
from cloche_server.node.keys import command_of_key, request_sha256
from cloche_server.node.lifecycle import Cause, Facts, Life, Why
from cloche_server.node.liveness import Liveness
from cloche_server.node.records import CommandRecord, SandboxRecord, plain_request, sandbox_view
from cloche_server.node.users import check_user
from cloche_server.node.way import Plan

RECENT_MAX: Final = 16
KILL_AGAIN_S: Final = 1.0
CLOSE_S: Final = 5.0
"""For what is still open on its way out; its guest is gone by then."""
REACH_S: Final = 15.0
"""A call to a sandbox that is still being adopted waits so long: longer than a silent guest is waited for (`STATE_S`)."""


class Sandbox:
    """From its journal line to its end. Made by the node (`booting`) or by `adoption`."""

    def __init__(
        self,
        context: Context,
        record: SandboxRecord,
        life: Life,
        on_ended: Callable[[Sandbox], None],
        plan: Plan | None = None,
    ) -> None:
        self.record = record
        self.life = life
        self.state = SandboxState.CREATING
        self.cause: Cause | None = None
        self.instance: Instance | None = None
        self.channel: Channel | None = None
        self.running: dict[str, RunningCommand] = {}
        self.recent: OrderedDict[str, RunningCommand] = OrderedDict()
        """The last few that ended: whoever started one mostly asks for its end at once."""
        self.ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.boot_task: asyncio.Task[Any] | None = None
        self.adoption: asyncio.Task[Any] | None = None
        """A new daemon's way back to it. Until it is done the sandbox runs, and has no channel."""
        self.cpu_sample: tuple[int, float] | None = None
        self.was_ready = False
        self.way = context.ways.open(record, self._command_record, plan)
        self._context = context
        self._on_ended = on_ended
        self._open_calls = 0
        self._idle_since_ns: int | None = context.clock.boot_ns()
        self._deadline: Entry | None = None
        self._liveness: Liveness | None = None
        self._watch: asyncio.Task[Any] | None = None
        self.oom_kills = 0
        self._end_when_ready = False

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def is_undone(self) -> bool:
        """It never came to be; nobody was told of it, and nothing of it stays."""
        return self.boot_task is None and self.cause is not None and self.cause.why is Why.CREATE_FAILED

    def view(self, usage: Usage | None = None) -> View:
        now_ns = self._context.clock.boot_ns()
        over = self.state is SandboxState.ENDED
        left = None if over else self.life.ends_in_s(now_ns, self._idle_since_ns)
        return sandbox_view(
            self.record,
            self.state,
            now_ns=now_ns,
            ends_in_s=left,
            commands_running=len(self.running),
            usage=usage,
            egress=self.way.view(),
        )

    def journal(self, kind: str, detail: dict[str, Any] | None = None) -> None:
        who = self.record
        self._context.journal.write(kind, sandbox=who.id, owner=who.owner, tenant=who.tenant, detail=detail)

    # --- becoming ready -----------------------------------------------------------------------------

    def attach(self, instance: Instance, channel: Channel) -> None:
        """The engine lives and its agent has spoken: watch both."""
        self.instance, self.channel = instance, channel
        self._watch = self._context.spawn(self._watch_death(instance), f"watch {self.id}")

    def detach(self) -> None:
        """The boot failed and undoes what it made: the death it brings about is not the reason."""
        if self._watch is not None:
            self._watch.cancel()
        self.instance, self.channel = None, None

    def runs(self) -> None:
        """For all the world it is there and its times count; in adoption before its channel is."""
        self.state = lifecycle.step(self.state, SandboxState.RUNNING)
        self.was_ready = True
        self.plan()

    def ready(self) -> None:
        if self.state is SandboxState.CREATING:
            self.runs()
        if self.channel is not None:
            self._liveness = Liveness(self._context, self.channel, self.id, self._silent)
            self._liveness.begin()
        if self._end_when_ready:
            self.end(Cause(Why.COMMAND, by="command"))

    def lost(self, reason: str) -> None:
        """The channel's word for its end: what the guest sent is never in the reason but by escape."""
        if reason.startswith("protocol_error"):
            self.end(Cause(Why.PROTOCOL_ERROR, detail=escaped(reason.removeprefix("protocol_error: "))))
        elif reason == "internal_error":
            self.end(Cause(Why.HOST, detail="the node failed on what the guest sent"))
        else:
            self.end(Cause(Why.DIED, detail="the guest's agent closed its channel"))

    async def _watch_death(self, instance: Instance) -> None:
        await instance.wait_dead()
        self.end(Cause(Why.DIED, detail="the engine's process died"))

    def _silent(self, detail: str) -> None:
        self.end(Cause(Why.UNRESPONSIVE, detail=detail))

    # --- times --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def call(self) -> AsyncIterator[Channel]:
        """A request is open: the sandbox is not idle. Gives the channel, or says that it has ended or is not made yet."""
        if self.state is not SandboxState.RUNNING:
            raise self.over()
        self._open_calls += 1
        self._idle_since_ns = None
        try:
            if self.channel is None and self.adoption is not None:
                await asyncio.wait([self.adoption], timeout=REACH_S)
            yield self.usable()
        finally:
            self._open_calls -= 1
            self._rest_if_idle()

    def usable(self) -> Channel:
        if self.state in (SandboxState.ENDING, SandboxState.ENDED) or self.channel is None:
            raise self.over()
        return self.channel

    def over(self) -> ClocheError:
        if self.state is SandboxState.CREATING:
            return error("conflict", "The sandbox is still being created.")
        if self.state is SandboxState.RUNNING:
            return error("time_out", f"The node started just now and has not reached the guest of {self.id} yet.")
        end = self.ended.result() if self.ended.done() else None
        detail = {"end": end.model_dump(mode="json", exclude_none=True)} if end else {}
        return error(
            "sandbox_ended", f"Sandbox {self.id} has ended{f' ({end.reason.value})' if end else ''}.", detail=detail
        )

    def _rest_if_idle(self) -> None:
        if not self._open_calls and not self.running and self.life.idle_timeout_s is not None:
            self._idle_since_ns = self._context.clock.boot_ns()
            self.plan()

    def extend(self, ttl_s: float) -> None:
        life = self.life.extended(self._context.clock.boot_ns(), ttl_s)
        if life != self.life:
            self.journal("sandbox.extended", {"ttl_deadline_ns": life.ttl_deadline_ns})
            self.life = life
            self.record.ttl_deadline_ns = life.ttl_deadline_ns

    def plan(self) -> None:
        """One entry, never later than the true deadline; when it is early it looks again."""
        at_ns, _ = self.life.deadline(self._idle_since_ns)
        if self._deadline is not None and self._deadline.action is not None:
            if self._deadline.at_ns <= at_ns:
                return
            self._deadline.cancel()
        self._deadline = self._context.agenda.at(at_ns, self._deadline_due)

    def _deadline_due(self) -> None:
        at_ns, why = self.life.deadline(self._idle_since_ns)
        if self.state is not SandboxState.RUNNING:
            return
        if at_ns <= self._context.clock.boot_ns():
            self.end(Cause(why))
        else:
            self.plan()

    # --- commands -----------------------------------------------------------------------------------

    def start_command(self, request: StartCommand, key: str | None) -> RunningCommand | CommandRecord:
        """Journalled with its stream before OPEN; a repeated key answers with the first one. Never awaits."""
        command, send_open = self.prepare_command(request, key)
        send_open()
        return command

    def prepare_command(
        self, request: StartCommand, key: str | None
    ) -> tuple[RunningCommand | CommandRecord, Callable[[], None]]:
        """The command, journalled, and what sends its OPEN: before any other stream is opened, because of its number."""
        channel = self.usable()
        text = request.model_dump_json()
        wanted = request_sha256(text)
        command = command_of_key(self.id, key) if key is not None else new_id("command")
        if key is not None and (known := self._known(command)) is not None:
            first = known if isinstance(known, CommandRecord) else known.record
            if first.request_sha256 != wanted:
                raise error("idempotency_conflict", "This Idempotency-Key was used for a different command.")
            return known, lambda: None
        slot = self.way.slots.next()
        fields = self._exec_fields(command, request, slot)
        check_size(request, fields)
        if channel.streams_open + 2 > STREAMS_PER_OPENER_MAX - 16:
            raise error("overloaded", "The sandbox has as many open streams as it can have.", retry_after_s=1.0)
        record = self._record_of(command, plain_request(text), wanted, channel.next_stream_id(), slot)
        running = self._journalled(record, request)
        return running, lambda: running.open(channel, fields)

    def _record_of(self, command: str, request: dict[str, Any], wanted: str, stream: int, slot: int) -> CommandRecord:
        clock = self._context.clock
        return CommandRecord(
            id=command,
            sandbox=self.id,
            request=request,
            stream=stream,
            created_ns=clock.boot_ns(),
            created_at=clock.wall_s(),
            request_sha256=wanted,
            slot=slot,
        )

    def _journalled(self, record: CommandRecord, request: StartCommand) -> RunningCommand:
        directory = self._context.store.add_command(record)
        points.reached("node.command.after_record")
        spare = self._context.spares.take
        log = CommandLog.create(directory, bytes_max=request.output_bytes_max, on_full=request.on_full, spare=spare)
        running = self.new_running(record, log)
        detail = {"stream": record.stream, "request_sha256": record.request_sha256}
        who = self.record
        self._context.journal.write(
            "command.starting", sandbox=who.id, command=record.id, owner=who.owner, tenant=who.tenant, detail=detail
        )
        self.take_over(running)
        return running

    def take_over(self, running: RunningCommand) -> None:
        self.running[running.id] = running
        self.way.slots.hold(running.record.slot, running.id)
        self._idle_since_ns = None

    def new_running(self, record: CommandRecord, log: CommandLog) -> RunningCommand:
        return RunningCommand(
            self._context, self.record, record, log, self._command_ended, self._command_stuck, self.way.before_end
        )

    def open_again(self, running: RunningCommand) -> None:
        """For adoption: it was journalled, and the guest never heard of it."""
        request = StartCommand.model_validate(running.record.request)
        running.open(self.usable(), self._exec_fields(running.id, request, running.record.slot))

    def _known(self, command: str) -> RunningCommand | CommandRecord | None:
        return self.running.get(command) or self.recent.get(command) or self._context.store.command(self.id, command)

    def _command_record(self, command: str) -> CommandRecord | None:
        found = self.running.get(command) or self.recent.get(command)
        return None if found is None else found.record

    def _exec_fields(self, command: str, request: StartCommand, slot: int) -> JsonObject:
        terminal = request.terminal
        fields: JsonObject = {
            "command": command,
            "argv": request.argv,
            "env": self.way.exec_env(slot, request.env),
            "cwd": request.cwd or self.record.workdir or "/",
            "stdin": request.stdin or terminal is not None,
            "pty": None if terminal is None else terminal.model_dump(),
            "privileges": self.record.privileges,
        }
        if slot:
            fields["proxy_slot"] = slot
        user = request.user or self.record.user
        check_user(user)
        if user is not None:
            fields["user"] = user
        return fields

    def _command_ended(self, command: RunningCommand) -> None:
        self.running.pop(command.id, None)
        self.way.slots.free(command.record.slot, command.id)
        self.recent[command.id] = command
        while len(self.recent) > RECENT_MAX:
            self.recent.popitem(last=False)
        self._rest_if_idle()
        if self.record.end_with_command and command.id == self.record.first_command:
            if self.state is SandboxState.CREATING:  # a quick one: the create is answered first
                self._end_when_ready = True
            else:
                self.end(Cause(Why.COMMAND, by="command"))

    def _command_stuck(self, command: RunningCommand) -> None:
        self.end(Cause(Why.UNRESPONSIVE, detail=f"its agent did not end command {command.id} when it was told to"))

    # --- the end ------------------------------------------------------------------------------------

    def end(self, cause: Cause) -> None:
        """The first cause counts; it is in the journal before anything is killed."""
        if self.cause is not None:
            return
        self.cause = cause
        self.journal("sandbox.ending", {"why": cause.why.value, "by": cause.by, "detail": cause.detail})
        self.carry_out(cause)

    def carry_out(self, cause: Cause) -> None:
        """Also for adoption, when an earlier daemon had journalled the cause."""
        self.cause = cause
        self.state = lifecycle.step(self.state, SandboxState.ENDING)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._liveness is not None:
            self._liveness.stop()
        self._context.spawn(self._end(), f"end {self.id}")

    async def _end(self) -> None:
        if self.boot_task is not None:
            self.boot_task.cancel()
            await asyncio.wait([self.boot_task])
        if self.adoption is not None:
            if self.instance is not None:  # only the guest's word is missing; else: what there is to kill
                self.adoption.cancel()
            await asyncio.wait([self.adoption])
        if self.channel is not None:
            self.channel.close("ended")
        closing = self._context.spawn(self.way.close("ended"), f"close the way out of {self.id}")
        if self.instance is not None:
            used = self.instance.stats()
            self.record.last_usage = {"cpu_s": used.cpu_s, "memory_peak_bytes": used.memory_peak_bytes}
            self.oom_kills += await self._kill(self.instance)
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.wait([closing], timeout=CLOSE_S)
        self._settle()

    async def _kill(self, instance: Instance) -> int:
        """Until everything of it is gone: a keeper that is being replaced answers later."""
        while True:
            try:
                return (await instance.kill()).oom_kills
            except (EngineError, OSError) as bad:
                self._context.log.error("kill failed", sandbox=self.id, error=str(bad))
                await asyncio.sleep(KILL_AGAIN_S)

    def _settle(self) -> None:
        assert self.cause is not None
        clock, record = self._context.clock, self.record
        end = lifecycle.sandbox_end(Facts(self.cause, self.oom_kills, self._first_end()), clock.wall_s())
        for command in list(self.running.values()):
            command.end_with_sandbox(end)
        record.end = end.model_dump(mode="json", exclude_none=True)
        record.ended_at = clock.wall_s()
        record.lived_s = max(0.0, (clock.boot_ns() - record.created_ns) / 1e9)
        self.journal("sandbox.ended", {**record.end, "oom_kills": self.oom_kills})
        self._context.store.save_sandbox(record)
        self.state = lifecycle.step(self.state, SandboxState.ENDED)
        self.instance, self.channel = None, None
        self.ended.set_result(end)
        self._on_ended(self)

    def _first_end(self) -> End | None:
        first = self.record.first_command
        if first is None:
            return None
        if (recent := self.recent.get(first)) is not None:
            return recent.ended.result()
        record = self._context.store.command(self.id, first)
        return End.model_validate(record.end) if record is not None and record.end else None
