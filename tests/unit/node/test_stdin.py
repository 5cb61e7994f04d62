"""Stdin of a command that ends on its own while somebody still writes."""

import asyncio
from pathlib import Path

import pytest

from cloche.wire.commands import StartCommand
from tests.unit.node.house import ME, House, make_images, once, raises
from tests.unit.node.native_engine import can_run

pytestmark = pytest.mark.skipif(not can_run(), reason="needs root, unshare and a built agent (just setup)")


@pytest.mark.req("EXE-1")
async def test_an_end_of_file_for_a_command_that_has_ended_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last credit and its end can come in one read: then all is confirmed, and nobody is there for the end of file."""
    house = House(tmp_path, make_images(tmp_path))
    await house.node.start()
    made = await house.create()
    request = StartCommand(argv=["sh", "-c", "read line"], stdin=True)
    command = await house.node.start_command(ME, made.id, request, None)
    running = house.node.roster.live[made.id].running[command.id]

    confirmed = running.stdin._confirmed

    async def confirmed_with_the_end(target: int) -> None:
        await confirmed(target)
        await asyncio.shield(running.ended)

    monkeypatch.setattr(running.stdin, "_confirmed", confirmed_with_the_end)
    writing = house.node.write_stdin(ME, made.id, command.id, 0, once(b"all\n"), eof=True)
    refused = await raises("command_ended", writing)
    assert refused.detail == {"stdin_offset": 4}
    kinds = [event.kind for event in (await house.node.events(ME, made.id, after=0, limit=100)).events]
    assert kinds[-1] == "command.ended", "nothing is journalled of it any more"
    await house.node.kill_all(ME)
    await house.node.stop()
