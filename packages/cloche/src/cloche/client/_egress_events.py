"""A sandbox's egress records, read from a stream. Pure."""

from __future__ import annotations

from pydantic import ValidationError

from cloche.client._stream import EventParser
from cloche.wire.egress import EgressRecord
from cloche.wire.errors import Problem, error, from_problem


class RecordReader:
    """Bytes to records. Knows the last one's number, so that the next connection goes on from there."""

    def __init__(self, after: int = 0) -> None:
        self.after = after
        self.ended = False
        """The node has said that no more will come."""
        self._parser = EventParser()

    def reconnected(self) -> None:
        """A new connection: half an event of the old one is forgotten."""
        self._parser = EventParser()

    def feed(self, data: bytes) -> list[EgressRecord]:
        records = []
        for event in self._parser.feed(data):
            try:
                if event.name == "error":
                    raise from_problem(Problem.model_validate_json(event.data))
                if event.name == "end":
                    self.ended = True
                if event.name != "record":
                    continue  # or a name that a newer node has
                record = EgressRecord.model_validate_json(event.data)
            except ValidationError as raised:
                raise error("internal", "The node sent an event that can't be read (ValidationError).") from raised
            if record.seq > self.after:
                self.after = record.seq
                records.append(record)
        return records
