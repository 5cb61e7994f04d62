from __future__ import annotations

import itertools
import random
from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.client._results import Chunk, CommandFailed, Result, escaped, unfinished
from cloche.client._stream import Ended, EventParser, OutputReader, Started
from cloche.wire.commands import Command, CommandState, Cursor, OutputState
from cloche.wire.ends import End, EndReason
from cloche.wire.errors import ClocheError, error, to_problem
from cloche_server.api.backend import OutputChunk
from cloche_server.api.streams import EVENT_BYTES_MAX, model_event, output_events

VIEW = Command(
    id="cloc" + "a" * 16,
    sandbox="sloc" + "b" * 16,
    argv=["true"],
    state=CommandState.ENDED,
    created_at=1.0,
    output=OutputState(end=9),
    ended=End(reason=EndReason.EXITED, exit_code=0),
)


def fed(parser: EventParser, data: bytes, cuts: list[int]) -> list[tuple[str, bytes, str | None]]:
    found = []
    edges = [0, *sorted(cuts), len(data)]
    for low, high in itertools.pairwise(edges):
        found += [(event.name, event.data, event.id) for event in parser.feed(data[low:high])]
    return found


STREAM = b": alive\n\nid: 1.2\nevent: stdout\ndata: MAo=\n\nevent:stderr\r\ndata:QQ==\r\nid:1.3\r\n\r\n: x\n\ndata: a\ndata: b\n\nevent: end\n\n"
EVENTS = [("stdout", b"MAo=", "1.2"), ("stderr", b"QQ==", "1.3"), ("message", b"a\nb", None)]


@pytest.mark.req("EXE-3")
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_split_gives_the_same_events(cuts: list[int]) -> None:
    assert fed(EventParser(), STREAM, cuts) == EVENTS


def test_byte_by_byte() -> None:
    assert fed(EventParser(), STREAM, list(range(len(STREAM)))) == EVENTS


def test_an_event_without_end_is_an_error() -> None:
    parser = EventParser(bytes_max=100)
    parser.feed(b"data: " + b"x" * 50)
    with pytest.raises(ClocheError) as raised:
        parser.feed(b"x" * 50)
    assert raised.value.code == "internal"


@pytest.mark.req("EXE-3")
@pytest.mark.parametrize("size", [0, 1, 3, 1000, EVENT_BYTES_MAX, EVENT_BYTES_MAX + 1, 3 * EVENT_BYTES_MAX + 7])
def test_what_the_server_writes_the_client_reads(size: int, seed: int) -> None:
    dice = random.Random(seed)
    data = dice.randbytes(size)
    wire = output_events(OutputChunk(3, 500, 2, memoryview(data))) + model_event("end", VIEW)
    reader = OutputReader(Cursor(generation=3, offset=500))
    items = []
    at = 0
    while at < len(wire):
        step = dice.randint(1, 100_000)
        items += reader.feed(wire[at : at + step])
        at += step
    chunks = [item for item in items if isinstance(item, Chunk)]
    assert b"".join(chunk.data for chunk in chunks) == data
    assert {chunk.fd for chunk in chunks} <= {2}
    assert reader.cursor == Cursor(generation=3, offset=500 + size)
    assert isinstance(items[-1], Ended)


def test_half_an_event_of_a_dead_connection_is_forgotten() -> None:
    reader = OutputReader()
    assert isinstance(reader.feed(model_event("command", VIEW))[0], Started)
    assert reader.cursor == Cursor(generation=1, offset=0)
    reader.feed(b"id: 1.5\nevent: stdout\nda")
    reader.reconnected()
    [chunk] = reader.feed(b"id: 1.2\nevent: stdout\ndata: " + b64encode(b"ab") + b"\n\n")
    assert isinstance(chunk, Chunk)
    assert chunk.data == b"ab"
    assert str(reader.cursor) == "1.2"


@pytest.mark.parametrize(
    "bad",
    [
        b"event: stdout\ndata: MAo=\n\n",
        b"id: x\nevent: stdout\ndata: MAo=\n\n",
        b"id: 1.1\nevent: stdout\ndata: !\n\n",
        b"event: end\ndata: {}\n\n",
    ],
)
def test_garbage_is_our_error(bad: bytes) -> None:
    with pytest.raises(ClocheError) as raised:
        OutputReader().feed(bad)
    assert raised.value.code == "internal"


def test_an_error_event_is_raised_as_itself() -> None:
    problem = to_problem(error("cursor_lost", "Gone.", detail={"first": 7})).model_dump_json()
    with pytest.raises(ClocheError) as raised:
        OutputReader().feed(f"event: error\ndata: {problem}\n\n".encode())
    assert (raised.value.code, raised.value.detail) == ("cursor_lost", {"first": 7})


@given(st.text(max_size=40), st.lists(st.integers(0, 160), max_size=6))
def test_text_survives_any_split(text: str, cuts: list[int]) -> None:
    data = text.encode()
    reader = OutputReader()
    said = ""
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for low, high in itertools.pairwise(edges):
        if low < high:
            wire = output_events(OutputChunk(1, low, 1, data[low:high]))
            said += "".join(item.text for item in reader.feed(wire) if isinstance(item, Chunk))
    assert said == text


def test_unfinished() -> None:
    assert unfinished("é".encode()[:1]) == b"\xc3"
    assert unfinished("😀".encode()[:3]) == "😀".encode()[:3]
    assert unfinished("😀".encode()) == b""
    assert unfinished(b"\x80\x80\x80") == b""


@pytest.mark.req("UX-2")
def test_results_print_usefully_and_escaped() -> None:
    result = Result(VIEW, b"fine\n\x1b[2J", b"", End(reason=EndReason.EXITED, exit_code=0))
    assert repr(result) == "<Result exit code 0 stdout='fine\\n\\x1b[2J' command=caaaaa>"
    failed = Result(VIEW, b"", b"line\nlast \x1b]0;x\x07", End(reason=EndReason.EXITED, exit_code=3))
    with pytest.raises(CommandFailed) as raised:
        failed.check()
    assert raised.value.result is failed
    assert raised.value.code == "command_failed"
    assert str(raised.value).isprintable()
    assert escaped("\u202e\x1b") == "\\u202e\\x1b"
    assert "mylink" not in repr(Chunk(b"x" * 500, 1, Cursor()))
