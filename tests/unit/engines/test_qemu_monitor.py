"""The monitor's client against a VMM that says what it likes."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cloche_server.engines.qemu import monitor as monitor_module
from cloche_server.engines.qemu.monitor import LINE_BYTES_MAX, SKIPPED_BYTES_MAX, Monitor, MonitorError

GREETING = b'{"QMP": {"version": {}, "capabilities": ["oob"]}}\r\n'
Answer = Callable[[str, str], bytes]


class Vmm:
    """The far end: answers each question with whatever the test's function makes of (command, id)."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.far.setblocking(False)
        self.asked: list[str] = []
        self.raw = b""

    async def serve(self, answer: Answer, first: bytes = GREETING) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.far, first)
            while read := await loop.sock_recv(self.far, 65536):
                self.raw += read
                for line in read.lstrip(b"\xff").splitlines():
                    question = json.loads(line)
                    self.asked.append(question["execute"])
                    await loop.sock_sendall(self.far, answer(question["execute"], question["id"]))
        except OSError:
            return
        finally:
            self.far.close()


def good(command: str, ticket: str) -> bytes:
    return json.dumps({"return": {"was": command}, "id": ticket}).encode() + b"\r\n"


@pytest.fixture
async def vmm() -> AsyncIterator[Vmm]:
    made = Vmm()
    yield made
    made.near.close()
    made.far.close()


async def ask(vmm: Vmm, answer: Answer, first: bytes = GREETING, command: str = "cont") -> Any:
    serving = asyncio.create_task(vmm.serve(answer, first))
    try:
        return await Monitor(vmm.near).ask(command)
    finally:
        serving.cancel()


async def test_a_question_is_answered_after_the_capabilities(vmm: Vmm) -> None:
    assert await ask(vmm, good) == {"was": "cont"}
    assert vmm.asked == ["qmp_capabilities", "cont"]
    assert vmm.raw.startswith(b"\xff{")  # ends a predecessor's half question


async def test_events_and_a_predecessors_leavings_are_skipped(vmm: Vmm) -> None:
    def noisy(command: str, ticket: str) -> bytes:
        return b'{"event": "RESUME"}\r\n\r\n[1]\r\n{"return": 1, "id": "old"}\r\n' + good(command, ticket)

    assert await ask(vmm, noisy, first=b'tus": "running"}}\r\n' + GREETING) == {"was": "cont"}


async def test_capabilities_that_a_predecessor_negotiated_are_no_error(vmm: Vmm) -> None:
    def done(command: str, ticket: str) -> bytes:
        if command == "qmp_capabilities":
            return json.dumps({"error": {"class": "CommandNotFound", "desc": "done"}, "id": ticket}).encode() + b"\n"
        return good(command, ticket)

    assert await ask(vmm, done) == {"was": "cont"}


@pytest.mark.parametrize(
    "error",
    [None, 1, "x", {}, {"class": ["x"], "desc": {}}, {"class": "GenericError", "desc": "\x1b[31m" + "x" * 9999}],
)
async def test_a_refusal_is_short_and_escaped(vmm: Vmm, error: Any) -> None:
    def refuse(command: str, ticket: str) -> bytes:
        return json.dumps({"error": error, "id": ticket}).encode() + b"\n"

    with pytest.raises(MonitorError, match="refused") as caught:
        await ask(vmm, refuse)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("garbage", "message"),
    [
        (b"x" * (LINE_BYTES_MAX + 65536), "a line of more than"),
        (b"[" * 60_000 + b"\n" + b"{}\n" * SKIPPED_BYTES_MAX, "before an answer"),
        ((b"\x00" * 1000 + b"\n") * (SKIPPED_BYTES_MAX // 1000 + 1), "before an answer"),
    ],
    ids=["endless-line", "deep-and-many", "not-json"],
)
async def test_a_vmm_that_never_comes_to_the_point_is_bounded(vmm: Vmm, garbage: bytes, message: str) -> None:
    with pytest.raises(MonitorError, match=message):
        await ask(vmm, lambda _command, _ticket: garbage)


async def test_silence_ends_in_time(vmm: Vmm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "ANSWER_S_MAX", 0.05)
    with pytest.raises(MonitorError, match="no answer to cont"):
        await ask(vmm, lambda _command, _ticket: b"")


async def test_a_closed_monitor_is_an_engine_error(vmm: Vmm) -> None:
    vmm.far.close()
    with pytest.raises(MonitorError) as caught:
        await Monitor(vmm.near).ask("cont")
    assert caught.value.code == "host_failure"


async def test_questions_wait_for_each_other(vmm: Vmm) -> None:
    serving = asyncio.create_task(vmm.serve(good))
    monitor = Monitor(vmm.near)
    answers = await asyncio.gather(*(monitor.ask(f"q{number}") for number in range(5)))
    assert answers == [{"was": f"q{number}"} for number in range(5)]
    serving.cancel()
