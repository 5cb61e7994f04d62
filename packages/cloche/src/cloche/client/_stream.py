"""Server-sent events from bytes, and output chunks from events. Pure: any split of the bytes gives the same."""

from __future__ import annotations

from binascii import Error as Base64Error
from binascii import a2b_base64
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from cloche.client._results import Chunk
from cloche.wire.commands import Command, Cursor
from cloche.wire.errors import ClocheError, Problem, error, from_problem

EVENT_BYTES_MAX: Final = 8 * 1024 * 1024


@dataclass(frozen=True)
class Event:
    """One event: its name, its id if it has one, and its data."""

    name: str
    data: bytes
    id: str | None = None


class EventParser:
    """Lines may end in LF or CR LF. Comments are dropped; an event that never ends is an error."""

    def __init__(self, bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._buffer = bytearray()
        self._scanned = 0
        self._name = ""
        self._id: str | None = None
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[Event]:
        buffer = self._buffer
        buffer += data
        events: list[Event] = []
        start = 0
        while (end := buffer.find(b"\n", max(self._scanned, start))) >= 0:
            stop = end - 1 if end > start and buffer[end - 1] == 0x0D else end
            event = self._line(bytes(memoryview(buffer)[start:stop]))
            if event is not None:
                events.append(event)
            start = end + 1
        if start:
            del buffer[:start]
        self._scanned = len(buffer)
        if self._size + len(buffer) > self._bytes_max:
            raise error("internal", "The node sent an event without end.")
        return events

    def _line(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if field == b"data":
            self._data.append(value)
            self._size += len(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"id":
            self._id = value.decode("utf-8", "replace")
        return None

    def _dispatch(self) -> Event | None:
        event = None
        if self._data:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            event = Event(self._name or "message", data, self._id)
        self._name, self._id, self._data, self._size = "", None, [], 0
        return event


@dataclass(frozen=True)
class Ended:
    """The stream's last word: the command as it is now."""

    command: Command


@dataclass(frozen=True)
class Started:
    """The stream's first word, when the command was started by the same request."""

    command: Command


class OutputReader:
    """Events to chunks. Knows where it stands, so that the next connection goes on from there."""

    def __init__(self, start: Cursor | None = None) -> None:
        self.cursor = start
        self._parser = EventParser()
        self._carry: dict[int, bytes] = {}

    def feed(self, data: bytes) -> list[Chunk | Started | Ended]:
        return [item for event in self._parser.feed(data) if (item := self._item(event)) is not None]

    def reconnected(self) -> None:
        """A new connection: half an event of the old one is forgotten."""
        self._parser = EventParser()

    def _item(self, event: Event) -> Chunk | Started | Ended | None:
        try:
            if event.name in ("stdout", "stderr"):
                return self._chunk(event)
            if event.name == "end":
                return Ended(Command.model_validate_json(event.data))
            if event.name == "command":
                return self._started(Command.model_validate_json(event.data))
            if event.name == "error":
                raise from_problem(Problem.model_validate_json(event.data))
        except (ValidationError, ValueError, Base64Error) as raised:
            raise _garbled(raised) from raised
        return None  # a name that a newer node has

    def _started(self, command: Command) -> Started:
        if self.cursor is None:
            self.cursor = Cursor(generation=command.output.generation, offset=command.output.first)
        return Started(command)

    def _chunk(self, event: Event) -> Chunk:
        fd = 1 if event.name == "stdout" else 2
        data = a2b_base64(event.data, strict_mode=True)
        self.cursor = Cursor.parse(event.id or "")
        carry = self._carry.get(fd, b"")
        chunk = Chunk(data, fd, self.cursor, carry)
        self._carry[fd] = chunk.tail
        return chunk


def _garbled(raised: Exception) -> ClocheError:
    return error("internal", f"The node sent an event that can't be read ({type(raised).__name__}).")
