"""One process: what goes through it, and that everything of it ends at once when it dies, hangs or lies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator

import pytest

from cloche_server.egress.interception import control, link
from cloche_server.egress.interception.link import Link
from tests.unit.interception.parts import DOUBLE, LINEAGE, Child, GateSide, received, target

pytestmark = [pytest.mark.req("NET-9")]
SANDBOX = "s" + "0" * 19


class Held:
    def __init__(self, child: Child) -> None:
        self.child = child
        self.reasons: list[str] = []
        self.link = Link(child, lambda link, _: self.reasons.append(link.why))

    def open(self, host: str, gate: GateSide | None = None) -> tuple[GateSide, socket.socket]:
        gate = gate or GateSide()
        return gate, self.link.open(gate, SANDBOX, LINEAGE, target(host), tls=True, rule="egress[0]")


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    made = Held(Child(sys.executable, "-I", "-S", str(DOUBLE)))
    await made.link.ready()
    yield made
    await made.link.end("the test is over")
    assert made.child.process.poll() is not None


async def test_bytes_go_through_and_back(held: Held) -> None:
    gate, end = held.open("echo.test")
    end.send(b"hello")
    assert await received(end) == b"hello"
    end.close()
    await gate.over.wait()
    assert gate.seen == [("closed",)]
    assert held.link.connections == 0


async def test_it_asks_and_dials_before_bytes_flow(held: Held) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    gate, end = held.open("through.test", GateSide(theirs))
    end.send(b"up")
    assert await received(ours) == b"up"
    ours.send(b"down")
    assert await received(end) == b"down"
    assert gate.seen == [("request", "GET", "/through"), ("dial",)]
    assert theirs.fileno() == -1, "the process alone has that end"


async def test_a_refusal_and_a_failed_dial_are_told(held: Held) -> None:
    _, end = held.open("refused.test", GateSide(allow=False))
    assert await received(end) == b"403 path_not_allowed"
    _, end = held.open("through.test")
    assert await received(end) == b"502 Network is unreachable"


async def test_its_text_is_escaped_and_its_descriptor_dropped(held: Held) -> None:
    before = len(os.listdir("/proc/self/fd"))
    gate, end = held.open("descriptor.test")
    while not gate.seen:
        await asyncio.sleep(0.01)
    assert gate.seen == [("alert", "secret_in_request", r"x\x1b[31m", "S")]
    assert len(os.listdir("/proc/self/fd")) <= before + 1, "only the new connection's end"
    end.close()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("garbage", "none"),
        ("huge", "4294967295 bytes"),
        ("stranger", "never opened"),
        ("type", "none"),
        ("unknown", "none"),
        ("twice", "asked before"),
        ("asks", "too many asks"),
        ("babble", "more messages"),
        ("crash", "hung up|died"),
    ],
)
async def test_a_lie_ends_it_and_everything_of_it(held: Held, how: str, reason: str) -> None:
    other, other_end = held.open("echo.test")
    gate, end = held.open(f"{how}.test")
    async with asyncio.timeout(5):
        await gate.over.wait()
        await other.over.wait()
    assert len(held.reasons) == 1
    assert any(part in held.reasons[0] for part in reason.split("|")), held.reasons
    for each in (end, other_end):
        assert await _over(each)
    assert held.link.is_over
    with pytest.raises(ConnectionError):
        held.open("echo.test")
    await held.link.end("again")
    assert held.child.process.poll() is not None
    assert held.child.kills == 1


async def _over(end: socket.socket) -> bool:
    try:
        return await received(end) == b""
    except ConnectionResetError:
        return True


async def test_a_kill_closes_what_is_open_at_once(held: Held) -> None:
    gate, end = held.open("echo.test")
    end.send(b"x")
    assert await received(end) == b"x"
    os.kill(held.child.pid, signal.SIGKILL)
    async with asyncio.timeout(1):
        assert await _over(end)
        await gate.over.wait()


async def test_a_defect_of_the_gate_ends_it(held: Held) -> None:
    gate = GateSide()

    async def broken(method: str, path: str) -> object:
        raise ZeroDivisionError

    gate.request = broken  # type: ignore[method-assign,assignment]
    held.open("through.test", gate)
    async with asyncio.timeout(5):
        await gate.over.wait()
    assert held.reasons == ["a question failed: ZeroDivisionError"]


async def test_a_flood_of_reports_is_counted_and_not_recorded(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held.link, "_reports", link.Attempts(50, time.monotonic()))
    gate, _ = held.open("flood.test")
    async with asyncio.timeout(20):
        await gate.over.wait()
    assert 50 <= len(gate.seen) < 1000
    counted = [str(each[2]) for each in gate.seen if each[:2] == ("denied", "rate_limited")]
    recorded = sum(each[:2] == ("denied", "flood") for each in gate.seen)
    assert recorded + sum(int(text.split()[0]) for text in counted) + held.link._unreported == 5000
    assert held.reasons == []


async def test_one_that_hangs_is_found(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HUNG_S", 0.2)
    again = Held(Child(sys.executable, "-I", "-S", str(DOUBLE)))
    await again.link.ready()
    again.open("hang.test")
    gate, _ = again.open("echo.test")
    async with asyncio.timeout(5):
        await gate.over.wait()
    assert again.reasons == ["it hangs"]
    await again.link.end("over")


async def test_one_that_is_quiet_and_has_read_all_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HUNG_S", 0.05)
    quiet = Held(Child(sys.executable, "-I", "-S", str(DOUBLE)))
    await quiet.link.ready()
    _, end = quiet.open("echo.test")
    await asyncio.sleep(0.5)
    end.send(b"still")
    assert await received(end) == b"still"
    await quiet.link.end("over")


async def test_one_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "WAITING_BYTES_MAX", 1 << 20)
    deaf = Held(Child("/bin/sleep", "60"))
    before = len(os.listdir("/proc/self/fd"))
    gate, _ = deaf.open("echo.test")
    for _ in range(40):
        deaf.link.tell({"t": "trust", "pem": "x" * 100_000})
    assert deaf.reasons == ["does not read what it is told"]
    assert gate.over.is_set()
    await deaf.link.end("over")
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_one_that_never_begins_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "READY_S", 0.1)
    mute = Held(Child("/bin/sleep", "60"))
    with pytest.raises(TimeoutError):
        await mute.link.ready()
    await mute.link.end("over")
    assert mute.child.process.poll() is not None
