"""Events of long work: in their order, bounded however slowly they are read, and the work ends with its reader."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

import pytest

from cloche.wire.errors import ClocheError, error
from cloche.wire.images import ImageEvent, ImageView
from cloche_server.node.telling import EVENTS_MAX, LEFT_OUT, OUTPUT_CHARS_MAX, Backlog, told

VIEW = ImageView(
    digest="sha256:ab",
    names=["x:1"],
    platform="linux/amd64",
    source="registry",
    layers=1,
    size_bytes=1,
    root_bytes=1,
    added_at=0,
    used_at=0,
)


async def test_events_come_as_they_are_said_and_done_is_last() -> None:
    go_on = asyncio.Event()

    async def work(say: Callable[[ImageEvent], None]) -> Sequence[ImageView]:
        say(ImageEvent(kind="resolved"))
        await go_on.wait()
        say(ImageEvent(kind="step", step="RUN"))
        say(ImageEvent(kind="done"))
        return [VIEW, VIEW]

    seen = []
    async with aclosing(told(work)) as events:
        async for event in events:
            seen.append(event.kind)
            go_on.set()
    assert seen == ["resolved", "step", "done", "done"]
    assert event.view == VIEW


async def test_a_failure_comes_after_what_was_said() -> None:
    async def work(say: Callable[[ImageEvent], None]) -> Sequence[ImageView]:
        say(ImageEvent(kind="resolved"))
        raise error("image_corrupt", "damaged")

    events = told(work)
    assert (await anext(events)).kind == "resolved"
    with pytest.raises(ClocheError):
        await anext(events)


async def test_who_leaves_cancels_the_work() -> None:
    ended = asyncio.Event()

    async def work(say: Callable[[ImageEvent], None]) -> Sequence[ImageView]:
        say(ImageEvent(kind="resolved"))
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return []

    events = told(work)
    assert (await anext(events)).kind == "resolved"
    await events.aclose()
    assert ended.is_set()


def test_memory_does_not_grow_with_a_slow_reader() -> None:
    backlog = Backlog()
    for done in range(100_000):
        backlog.say(ImageEvent(kind="layer", digest="a", bytes_done=done))
    (last,) = backlog.take()
    assert last.bytes_done == 99_999
    for number in range(100_000):
        backlog.say(ImageEvent(kind="layer", digest=str(number), bytes_done=1))
    assert len(backlog.take()) == EVENTS_MAX
    for _ in range(10_000):
        backlog.say(ImageEvent(kind="output", text="x" * 10_000))
    taken = backlog.take()
    assert sum(len(event.text or "") for event in taken) <= OUTPUT_CHARS_MAX + len(LEFT_OUT)
    assert taken[-1].text == LEFT_OUT
    backlog.say(ImageEvent(kind="output", text="again"))
    assert [event.text for event in backlog.take()] == ["again"]
