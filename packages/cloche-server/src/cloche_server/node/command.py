"""One running command: exactly once, its output logged before it is credited, its end journalled before it is confirmed.

Kinds of end that this node makes are journalled as a *cause* before the guest is told to kill. A time-out kills at once
(SIGKILL to the whole session): a grace period would let a command choose to run longer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from cloche.wire.commands import Command, CommandState, StartCommand, StdinState
from cloche.wire.ends import End
from cloche.wire.errors import error
from cloche_server import points
from cloche_server.channel import Channel, JsonObject, Stream, StreamState
from cloche_server.channel.frames import PAYLOAD_BYTES_MAX, encode_json
from cloche_server.node import lifecycle
from cloche_server.node.clock import NS, seconds
from cloche_server.node.command_log import CommandLog
from cloche_server.node.context import Context
from cloche_server.node.keeping import Entry
from cloche_server.node.lifecycle import Cause, Why
from cloche_server.node.log_reader import STDERR, STDOUT
from cloche_server.node.records import CommandRecord, SandboxRecord, command_view
from cloche_server.node.stdin import Stdin

KILL_S_MAX: Final = 30.0
ABORT_S: Final = 20.0
"""An agent that has not ended a command this long after it was told to is taken for stuck: its sandbox ends."""
SMALL_REQUEST_CHARS: Final = 16_384


class RunningCommand:
    """A command between its journal line and its end. It is the sink of its stdout stream."""

    def __init__(
        self,
        context: Context,
        sandbox: SandboxRecord,
        record: CommandRecord,
        log: CommandLog,
        on_ended: Callable[[RunningCommand], None],
        on_stuck: Callable[[RunningCommand], None],
        before_end: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self.record = record
        self.log = log
        self.cause: Cause | None = None
        self.ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.stdin = Stdin(context, sandbox, record)
        self.is_open = False
        self._context = context
        self._sandbox = sandbox
        self._on_ended = on_ended
        self._on_stuck = on_stuck
        self._before_end = before_end
        self._stream: Stream | None = None
        self._outputs: dict[int, Output] = {}
        self._answer: JsonObject | None = None
        self._timeout: Entry | None = None
        self._stuck: Entry | None = None
        log.on_room = self._flush

    @property
    def id(self) -> str:
        return self.record.id

    def view(self) -> Command:
        over = self.ended.done()
        self.record.stdin_offset = self.stdin.offset
        state = CommandState.ENDED if over else CommandState.RUNNING if self.is_open else CommandState.STARTING
        until = self.record.ended_ns or self._context.clock.boot_ns()
        return command_view(
            self.record, state=state, output=self.log.state, runtime_s=max(0.0, (until - self.record.created_ns) / NS)
        )

    # --- start --------------------------------------------------------------------------------------

    def open(self, channel: Channel, fields: JsonObject) -> None:
        """OPEN, on the streams that were journalled."""
        points.reached("node.command.before_open")
        self._outputs = {fd: Output(self, fd) for fd in self._fds()}
        stdout, *others = self._outputs.values()
        stream = channel.open(
            "exec", fields, sink=stdout, stream=self.record.stream, extra_streams=len(others), extra_sinks=others
        )
        channel.flush()  # the guest begins while the answer is put together
        self._attach(dict(zip(self._outputs, (stream, *stream.extra), strict=True)))
        if self.cause is not None:  # ended between its journal line and now
            self._abort(self.cause)

    def adopt(self, channel: Channel, states: dict[int, StreamState], logged: dict[int, int]) -> None:
        """Go on where the log ends, after a re-attach."""
        self._outputs = {fd: Output(self, fd) for fd in self._fds()}
        streams = {}
        for number, (fd, output) in enumerate(self._outputs.items()):
            stream_id = self.record.stream + 2 * number
            if stream_id in logged:
                output.adopted(logged[stream_id])
                streams[fd] = channel.adopt(stream_id, states[stream_id], sink=output)
        self.is_open = states[self.record.stream].opened
        self._attach(streams)
        self.stdin.adopted(states[self.record.stream])
        if self.cause is not None:
            self._abort(self.cause)

    def _attach(self, streams: dict[int, Stream]) -> None:
        self._stream = streams[STDOUT]
        self.stdin.attach(self._stream)
        for fd, each in streams.items():
            self._outputs[fd].stream = each
        timeout_s = self.record.request["timeout_s"]
        if timeout_s is not None:
            at_ns = self.record.created_ns + seconds(timeout_s)
            self._timeout = self._context.agenda.at(
                at_ns, lambda: self.end_by(Cause(Why.TIMEOUT, detail=f"after {timeout_s:g} s"))
            )

    def _fds(self) -> tuple[int, ...]:
        return (STDOUT, STDERR) if self.record.has_stderr else (STDOUT,)

    # --- ending -------------------------------------------------------------------------------------

    def end_by(self, cause: Cause) -> None:
        """This node ends it. The first cause counts."""
        if self.cause is not None or self.ended.done():
            return
        self.cause = cause
        self._journal("command.ending", {"why": cause.why.value, "by": cause.by, "detail": cause.detail})
        self._abort(cause)

    def _abort(self, cause: Cause) -> None:
        """From here on bytes that do not fit are dropped, so that the guest can get to its END."""
        for output in self._outputs.values():
            output.drop_waiting()
        if self._stream is not None:
            self._stream.abort(cause.why.value)
            self._stuck = self._context.agenda.after(ABORT_S, lambda: self._on_stuck(self))
        self._finish_if_over()

    async def kill(self, by: str) -> Command:
        self.end_by(Cause(Why.KILLED, by=by))
        try:
            async with asyncio.timeout(KILL_S_MAX):
                await asyncio.shield(self.ended)
        except TimeoutError as late:
            raise error("time_out", f"The command was not ended within {KILL_S_MAX:g} s; the guest may hang.") from late
        return self.view()

    def end_with_sandbox(self, end: End) -> None:
        """The sandbox is over and this command with it. What came before is kept, and so is a cause of its own."""
        if not self.ended.done():
            answer = {} if self._answer is None and self.cause is not None else self._answer
            self._settle(
                lifecycle.end_with_sandbox(end)
                if answer is None
                else lifecycle.command_end(answer, self.cause, end.at or 0.0)
            )

    def forgotten_by_guest(self) -> None:
        """After a re-attach: journalled as open, and the guest knows nothing of it."""
        self._settle(
            lifecycle.command_end(
                {}, Cause(Why.HOST, detail="the guest does not know this command"), self._context.clock.wall_s()
            )
        )

    def _finish_if_over(self) -> None:
        if self._answer is None or self._waiting_bytes or self.ended.done():
            return
        self._settle(lifecycle.command_end(self._answer, self.cause, self._context.clock.wall_s()))
        if self._stream is not None:
            self._stream.confirm()

    def _settle(self, end: End) -> None:
        """Journal, then the record, then everyone who waits. CONFIRM comes after it."""
        record, clock = self.record, self._context.clock
        record.stdin_offset = self.stdin.offset
        record.end = end.model_dump(mode="json", exclude_none=True)
        record.ended_ns, record.ended_at = clock.boot_ns(), clock.wall_s()
        record.request = {**record.request, "env": {}}
        self._journal("command.ended", record.end)
        points.reached("node.command.before_confirm")
        self.log.on_room = None
        self.log.complete = True
        record.output = self.log.state.model_dump(mode="json")
        self._context.store.save_command(record)
        for entry in (self._timeout, self._stuck):
            if entry is not None:
                entry.cancel()
        self.ended.set_result(end)
        self.stdin.over()
        self.log.finish()
        self._on_ended(self)

    def _journal(self, kind: str, detail: dict[str, Any]) -> None:
        who = self._sandbox
        self._context.journal.write(
            kind, sandbox=who.id, command=self.id, owner=who.owner, tenant=who.tenant, detail=detail
        )

    # --- what its streams tell ------------------------------------------------------------------------

    def opened(self) -> None:
        self.is_open = True

    def answered(self, result: JsonObject) -> None:
        self._answer = result
        self._before_end(self.id, self._finish_if_over)

    def log_is_full(self) -> None:
        limit = self.log.bytes_max
        self.end_by(Cause(Why.OUTPUT_LIMIT, detail=f"more than {limit} bytes of output"))

    def log_failed(self, failure: OSError) -> None:
        if self.cause is None:
            self._context.log.error("command log", sandbox=self._sandbox.id, command=self.id, error=str(failure))
        self.end_by(Cause(Why.HOST, detail=f"its output could not be written: {failure.strerror}"))

    @property
    def _waiting_bytes(self) -> int:
        return sum(output.waiting_bytes for output in self._outputs.values())

    def _flush(self) -> None:
        """A reader of a *blocking* log has moved: there may be room for what waits."""
        if self._waiting_bytes:
            for output in self._outputs.values():
                output.flush()
            self._finish_if_over()

    # --- talking to it --------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        self._running().tell({"signal": number, "group": True})

    def resize(self, rows: int, cols: int) -> None:
        if self.record.request["terminal"] is None:
            raise error("no_terminal", "The command has no terminal.")
        self._running().tell({"resize": {"rows": rows, "cols": cols}})

    async def write_stdin(self, offset: int, data: AsyncIterator[bytes], *, eof: bool) -> StdinState:
        self._running()
        return await self.stdin.write(offset, data, eof=eof)

    def _running(self) -> Stream:
        if self.ended.done() or self._stream is None:
            raise error("command_ended", "The command has ended.", detail={"stdin_offset": self.stdin.offset})
        return self._stream


class Output:
    """The sink of one of a command's two outputs: log, then credit."""

    def __init__(self, command: RunningCommand, fd: int) -> None:
        self.stream: Stream | None = None
        self.taken = 0
        """How much of it is dealt with: logged, or dropped because the command is being ended."""
        self.waiting_bytes = 0
        self.dropping = False
        """Once a byte was dropped, all that follow are: a log has no hole in the middle."""
        self._command = command
        self._fd = fd
        self._waiting: deque[bytes] = deque()
        """Bytes a *blocking* log has no room for: at most one window, because nothing of it is credited."""

    def adopted(self, logged: int) -> None:
        self.taken = logged
        self.dropping = logged > self._command.log.logged(self._fd)

    def data(self, view: memoryview) -> None:
        if self.dropping:
            self._take(len(view))
            return
        if self._waiting:
            self._keep(view)
            return
        size = len(view)
        written = self._write(view)
        points.reached("node.log.after_write")
        self._take(written)
        if written < size:
            self._overflow(view[written:])

    def _write(self, view: memoryview) -> int:
        try:
            return self._command.log.append(self._fd, (view,))
        except OSError as failure:
            self._command.log_failed(failure)
            return 0

    def _overflow(self, rest: memoryview) -> None:
        command = self._command
        if command.cause is None and command.log.on_full == "end":
            command.log_is_full()
        if command.cause is not None:
            self.dropping = True
            self._take(len(rest))
        else:
            self._keep(rest)

    def _keep(self, view: memoryview) -> None:
        self._waiting.append(bytes(view))
        self.waiting_bytes += len(view)

    def flush(self) -> None:
        while self._waiting:
            head = self._waiting.popleft()
            self.waiting_bytes -= len(head)
            written = self._write(memoryview(head))
            self._take(written)
            if written < len(head):
                if self._command.cause is None:  # else the log failed, and what waits is dropped already
                    self._waiting.appendleft(head[written:])
                    self.waiting_bytes += len(head) - written
                return

    def drop_waiting(self) -> None:
        dropped, self.waiting_bytes = self.waiting_bytes, 0
        self.dropping = self.dropping or dropped > 0
        self._waiting.clear()
        self._take(dropped)

    def _take(self, count: int) -> None:
        self.taken += count
        if self.stream is not None and count:
            self.stream.consumed(self.taken)

    def opened(self, info: JsonObject) -> None:
        self._command.opened()

    def eof(self, offset: int) -> None: ...

    def end(self, result: JsonObject) -> None:
        if self._fd == STDOUT:  # the stderr stream is told first
            self._command.answered(result)

    def credit(self, consumed: int, limit: int) -> None:
        if self._fd == STDOUT:
            self._command.stdin.changed()

    def lost(self, reason: str) -> None:
        if self._fd == STDOUT:
            self._command.stdin.changed()


def check_size(request: StartCommand, fields: JsonObject) -> None:
    """An OPEN is one frame. Most are small: only then is it not worth encoding it twice."""
    chars = sum(map(len, request.argv)) + sum(len(name) + len(value) for name, value in request.env.items())
    if chars + 8 * (len(request.argv) + 2 * len(request.env)) <= SMALL_REQUEST_CHARS:
        return
    size = len(encode_json({"op": "exec", **fields, "stderr_stream": 1 << 32}))
    if size > PAYLOAD_BYTES_MAX:
        raise error(
            "too_large",
            f"Arguments and environment have {size} bytes; {PAYLOAD_BYTES_MAX} is the most. Send it as a file.",
        )
