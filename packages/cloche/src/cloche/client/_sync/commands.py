# Made by tools/unasync.py from packages/cloche/src/cloche/client/_async/commands.py: edit that one.
"""Commands: durable objects, not connections. Output is followed over as many connections as it takes."""

from __future__ import annotations

import builtins
import signal as signals
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Final

from cloche.client._requests import bytes_of, request_body, start_request
from cloche.client._results import Chunk, Result, command_line, how
from cloche.client._stream import Ended, OutputReader, Started
from cloche.client._sync.node import path_part
from cloche.client._sync.terminal import Terminal
from cloche.client._sync.transport import STREAM_SILENCE_S, Lost, Transport, new_key
from cloche.wire import defaults
from cloche.wire.commands import Command as CommandView
from cloche.wire.commands import CommandList, Cursor, OnFull, Resize, Signal, StdinState
from cloche.wire.commands import Terminal as TerminalRequest
from cloche.wire.ends import End
from cloche.wire.errors import ClocheError, error
from cloche.wire.ids import short

WAIT_STEP_S: Final = 30.0
STDIN_PART_BYTES: Final = 1024 * 1024
_EVENTS: Final = {"accept": "text/event-stream"}


class Commands:
    """The commands of one sandbox."""

    def __init__(self, transport: Transport, sandbox: str) -> None:
        self._transport = transport
        self._base = f"/v1/sandboxes/{sandbox}/commands"

    def start(
        self,
        command: str | builtins.list[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: bool = False,
        terminal: TerminalRequest | None = None,
        merge_stderr: bool = False,
        output_bytes_max: int = defaults.OUTPUT_BYTES_MAX,
        on_full: OnFull = "end",
        key: str | None = None,
    ) -> Command:
        """Starts it and returns at once. `stdin=True`: it reads what `write_stdin` sends. `terminal`: it has a PTY."""
        body = start_request(
            command,
            cwd=cwd,
            env=env,
            user=user,
            timeout_s=timeout_s,
            stdin=stdin,
            terminal=terminal,
            merge_stderr=merge_stderr,
            output_bytes_max=output_bytes_max,
            on_full=on_full,
        )
        answer = self._transport.request("POST", self._base, content=body, key=key or new_key())
        return Command(self._transport, CommandView.model_validate_json(answer.body))

    def run(
        self,
        command: str | builtins.list[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: str | bytes | None = None,
        merge_stderr: bool = False,
        output_bytes_max: int = defaults.OUTPUT_BYTES_MAX,
        on_full: OnFull = "end",
    ) -> Result:
        """Starts it and follows it to its end: one request when it has no stdin."""
        body = start_request(
            command,
            cwd=cwd,
            env=env,
            user=user,
            timeout_s=timeout_s,
            stdin=stdin is not None,
            terminal=None,
            merge_stderr=merge_stderr,
            output_bytes_max=output_bytes_max,
            on_full=on_full,
        )
        if stdin is None:
            follow = Follow(self._transport, self._base, OutputReader(), body=body)
            return follow.result()
        answer = self._transport.request("POST", self._base, content=body, key=new_key())
        job = Command(self._transport, CommandView.model_validate_json(answer.body))
        job.feed(bytes_of(stdin))
        return job.result()

    def get(self, command: str) -> Command:
        """By id, or a unique prefix of it: from anywhere, also after the command has ended."""
        answer = self._transport.request("GET", f"{self._base}/{path_part(command)}")
        return Command(self._transport, CommandView.model_validate_json(answer.body))

    def list(self) -> builtins.list[Command]:
        answer = self._transport.request("GET", self._base)
        return [Command(self._transport, view) for view in CommandList.model_validate_json(answer.body).commands]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {short(self._base.split('/')[3])}>"


class Command:
    """A command: its output, its stdin, its end. It goes on when this object, or this program, is gone."""

    def __init__(self, transport: Transport, view: CommandView) -> None:
        self._transport = transport
        self.view = view
        """What was last heard about it; `info()` asks anew."""
        self._base = f"/v1/sandboxes/{view.sandbox}/commands"
        self._path = f"{self._base}/{view.id}"
        self._stdin_offset = view.stdin_offset

    @property
    def id(self) -> str:
        return self.view.id

    @property
    def ended(self) -> End | None:
        """How it ended, as far as was last heard."""
        return self.view.ended

    @property
    def exit_code(self) -> int | None:
        return self.view.ended.exit_code if self.view.ended else None

    def output(
        self, *, follow: bool = True, from_: Cursor | str | None = None, fd: int | None = None
    ) -> Iterator[Chunk]:
        """Chunks as they come, to the end of the output; `follow=False`: what is there now.

        `from_` is a chunk's `cursor`, kept from before. A connection that is lost is made again and goes on from
        exactly there: nothing is lost, nothing comes twice.
        """
        start = Cursor.parse(from_) if isinstance(from_, str) else from_
        reader = OutputReader(start)
        run = Follow(self._transport, self._base, reader, command=self.id, follow=follow, fd=fd)
        with closing(run.items()) as items:
            for item in items:
                if isinstance(item, Chunk):
                    yield item
                else:
                    self.view = item.command

    def result(self) -> Result:
        """Follows it to its end: all its output, and how it ended."""
        result = Follow(self._transport, self._base, OutputReader(), command=self.id).result()
        self.view = result.command
        return result

    def wait(self, timeout_s: float | None = None) -> End:
        """Waits for the end; `time_out` after `timeout_s` (the command goes on)."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while self.view.ended is None:
            left = WAIT_STEP_S if until is None else min(WAIT_STEP_S, until - time.monotonic())
            if left <= 0:
                raise error("time_out", f"{command_line(self.view.argv)} still runs after {timeout_s} s.")
            answer = self._transport.request(
                "GET", self._path, query={"wait_s": left}, timeout_s=left + STREAM_SILENCE_S
            )
            self._heard(answer.body)
        return self.view.ended

    def info(self) -> CommandView:
        """Asks the node."""
        return self._heard((self._transport.request("GET", self._path)).body)

    def write_stdin(self, data: str | bytes) -> int:
        """Sends bytes to its stdin, by offset: a repeat after a lost connection is not read twice. Returns the new offset."""
        self._send_stdin(bytes_of(data), eof=False)
        return self._stdin_offset

    def close_stdin(self) -> None:
        """The command reads end of file."""
        self._send_stdin(b"", eof=True)

    def feed(self, data: bytes) -> None:
        """All of its stdin at once. A command that ends without reading it is no error."""
        try:
            self._send_stdin(data, eof=True)
        except ClocheError as raised:
            if raised.code not in ("command_ended", "stdin_closed"):
                raise

    def _send_stdin(self, data: bytes, *, eof: bool) -> None:
        start = 0
        while True:
            part = data[start : start + STDIN_PART_BYTES]
            last = start + len(part) >= len(data)
            confirmed = (self.send_stdin(self._stdin_offset, part, eof=eof and last)).offset
            start += confirmed - self._stdin_offset
            self._stdin_offset = confirmed
            if last and start >= len(data):
                return

    def send_stdin(self, offset: int, data: bytes, *, eof: bool = False) -> StdinState:
        """One step of the above, for a caller who keeps the offset himself."""
        query = {"offset": offset, "eof": eof}
        answer = self._transport.request(
            "PUT", f"{self._path}/stdin", query=query, content=data, content_type="application/octet-stream"
        )
        return StdinState.model_validate_json(answer.body)

    def signal(self, number: int | signals.Signals = signals.SIGTERM) -> None:
        body = request_body(Signal, signal=int(number))
        self._transport.request("POST", f"{self._path}/signal", content=body)

    def kill(self) -> CommandView:
        """Ends it, and everything it started."""
        return self._heard((self._transport.request("DELETE", self._path)).body)

    def resize(self, rows: int, cols: int) -> None:
        """Its terminal's size."""
        body = request_body(Resize, rows=rows, cols=cols)
        self._transport.request("POST", f"{self._path}/resize", content=body)

    def attach(self, *, from_: Cursor | str | None = None) -> Terminal:
        """Its terminal: keys up, screen down. `from_`: go on from a cursor."""
        socket = self._transport.open_socket(f"{self._path}/terminal", {"from": from_})
        return Terminal(self._transport, socket)

    def _heard(self, body: bytes) -> CommandView:
        self.view = CommandView.model_validate_json(body)
        return self.view

    def __repr__(self) -> str:
        state = how(self.view.ended) if self.view.ended else self.view.state.value
        return f"<{type(self).__name__} {short(self.id)} {command_line(self.view.argv)!r} {state}>"


class Follow:
    """Reads output over one connection after another. With `body`, the first request also starts the command."""

    def __init__(
        self,
        transport: Transport,
        base: str,
        reader: OutputReader,
        *,
        body: bytes | None = None,
        command: str | None = None,
        follow: bool = True,
        fd: int | None = None,
    ) -> None:
        self._transport = transport
        self._base = base
        self._reader = reader
        self._body = body
        self._key = new_key()
        self._command = command
        self._query = {"follow": follow, "fd": fd}

    def items(self) -> Generator[Chunk | Started | Ended, None, None]:
        patience = self._transport.patience()
        while True:
            try:
                with closing(self._connection()) as items:
                    for item in items:
                        patience.progressed()
                        if isinstance(item, Started):
                            self._command = item.command.id
                        yield item
                        if isinstance(item, Ended):
                            return
                raise Lost(error("node_unavailable", "The stream ended before the command."), unsent=False)
            except Lost as lost:
                self._reader.reconnected()
                time.sleep(patience.delay_s(lost.failure))

    def _connection(self) -> Generator[Chunk | Started | Ended, None, None]:
        if self._command is None:
            assert self._body is not None
            headers = {**_EVENTS, "content-type": "application/json", "idempotency-key": self._key}
            opened = self._transport.stream(
                "POST", self._base, content=self._body, headers=headers, timeout_s=STREAM_SILENCE_S
            )
        else:
            query = {**self._query, "from": self._reader.cursor}
            path = f"{self._base}/{self._command}/output"
            opened = self._transport.stream("GET", path, query=query, headers=_EVENTS, timeout_s=STREAM_SILENCE_S)
        with opened as answer:
            for part in answer.parts:
                yield from self._reader.feed(part)

    def result(self) -> Result:
        parts: dict[int, builtins.list[bytes]] = {1: [], 2: []}
        with closing(self.items()) as items:
            for item in items:
                if isinstance(item, Chunk):
                    parts[item.fd].append(item.data)
                elif isinstance(item, Ended):
                    assert item.command.ended is not None
                    whole = item.command.output.first == 0
                    return Result(item.command, b"".join(parts[1]), b"".join(parts[2]), item.command.ended, whole)
        raise error("internal", "The node ended the stream without a word.")
