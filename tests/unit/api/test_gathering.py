"""What of an answer goes out together, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from cloche_server.api import gathering
from cloche_server.api.gathering import Gathered


class Written(asyncio.Transport):
    """Keeps what it was given, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.writes += [bytes(data) for data in list_of_data]

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def test_what_one_turn_says_is_one_write() -> None:
    below = Written()
    gathered = Gathered(below)
    gathered.write(b"head ")
    gathered.write(b"piece")
    assert below.writes == []
    await asyncio.sleep(0)
    assert below.writes == [b"head piece"]
    await asyncio.sleep(0.01)
    assert below.writes == [b"head piece"]


async def test_a_piece_that_may_wait_goes_with_the_next_one() -> None:
    below = Written()
    gathered = Gathered(below)
    gathered.write(b"command ")
    gathered.wait(60)
    await asyncio.sleep(0.01)
    assert below.writes == []
    gathered.write(b"output")
    await asyncio.sleep(0)
    assert below.writes == [b"command output"]


async def test_a_piece_that_may_wait_does_not_wait_longer_than_it_may() -> None:
    below = Written()
    gathered = Gathered(below)
    gathered.write(b"command")
    gathered.wait(0.001)
    async with asyncio.timeout(5):
        while not below.writes:
            await asyncio.sleep(0.001)
    assert below.writes == [b"command"]


async def test_the_end_takes_everything_with_it_at_once() -> None:
    below = Written()
    gathered = Gathered(below)
    gathered.write(b"command ")
    gathered.wait(60)
    gathered.write(b"end")
    gathered.flush()
    assert below.writes == [b"command end"]
    gathered.close()
    assert below.writes == [b"command end"]
    assert gathered.is_closing()


async def test_bulk_is_not_copied_and_comes_after_what_was_held() -> None:
    below = Written()
    gathered = Gathered(below)
    gathered.write(b"head")
    gathered.write_bulk(b"4\r\n", memoryview(b"bulk"), b"\r\n")
    assert below.writes == [b"head", b"4\r\n", b"bulk", b"\r\n"]


async def test_no_more_is_held_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "HELD_BYTES_MAX", 8)
    below = Written()
    gathered = Gathered(below)
    gathered.write(b"12345")
    gathered.write(b"6789")
    assert below.writes == [b"123456789"]


async def test_what_was_held_is_written_before_the_connection_is_closed() -> None:
    below = Written()
    gathered = Gathered(below)
    gathered.write(b"last words")
    gathered.close()
    assert below.writes == [b"last words"]
    assert below.closed
