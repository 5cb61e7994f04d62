"""A command's end waits for the interceptor's last word on what the command had open, and never long."""

import asyncio

import pytest

from cloche_server.egress.settling import WAIT_S_MAX, Settling


@pytest.mark.req("NET-6")
async def test_nobody_waits_who_had_nothing_intercepted() -> None:
    settling, told = Settling(), []
    settling.add(None, "of nobody")
    settling.add("c1", "a")
    settling.when_settled("c2", lambda: told.append("c2"))
    assert told == ["c2"]
    settling.remove("c1", "a")
    settling.remove("c1", "a")
    settling.when_settled("c1", lambda: told.append("c1"))
    assert told == ["c2", "c1"]


@pytest.mark.req("NET-6")
async def test_the_last_connection_settles_it() -> None:
    settling, told = Settling(), []
    for connection in "ab":
        settling.add("c1", connection)
    settling.when_settled("c1", lambda: told.append("c1"))
    settling.remove("c1", "a")
    assert told == []
    settling.remove("c1", "b")
    assert told == ["c1"]
    await asyncio.sleep(WAIT_S_MAX * 1.5)
    assert told == ["c1"], "once"


@pytest.mark.req("NET-6")
async def test_an_interceptor_that_says_nothing_holds_nothing_up() -> None:
    settling, told = Settling(), asyncio.Event()
    settling.add("c1", "a")
    settling.when_settled("c1", told.set)
    async with asyncio.timeout(1):
        await told.wait()
    settling.remove("c1", "a")
