"""The export of a layer by a sentry that lies: bounded, typed, resumed where that is possible, and no descriptor is left."""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from cloche_server.engines.contract import EngineError, IsolationReport
from cloche_server.engines.gvisor import control, export
from cloche_server.engines.gvisor.engine import GVisorInstance
from cloche_server.keeper.client import Attached, Held, KeeperClient

pytestmark = [pytest.mark.req("ISO-7"), pytest.mark.req("IMG-1")]
ID = "s" + "d" * 19
OK = b'{"success":true,"result":{}}'
Tar = Callable[["Sentry", socket.socket, int], Coroutine[Any, Any, None]]


class Sentry:
    """Answers Pause and Resume as a sentry does, and counts how deep it stands still; the tar is the test's."""

    def __init__(self, tar: Tar, *, pause: bytes = OK, resume: bytes = OK) -> None:
        self._tar = tar
        self._answers = {"containerManager.Pause": pause, "containerManager.Resume": resume}
        self.asked: list[str] = []
        self.connections = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.kept: list[int] = []

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.connections += 1
        self._tasks.append(asyncio.create_task(self._serve(theirs)))
        return ours

    async def _serve(self, end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                ready = asyncio.Event()
                loop.add_reader(end, ready.set)
                await ready.wait()
                loop.remove_reader(end)
                data, ancillary, _, _ = end.recvmsg(4096, socket.CMSG_SPACE(16))
                if not data:
                    return
                method = json.loads(data)["method"]
                self.asked.append(method.rpartition(".")[2])
                if method == "Fs.TarRootfsUpperLayer":
                    fds = array.array("i")
                    fds.frombytes(ancillary[0][2])
                    await self._tar(self, end, fds[0])
                else:
                    await loop.sock_sendall(end, self._answers[method])
        except OSError:
            return  # the other side hung up
        finally:
            end.close()

    async def attach(self, sandbox: str) -> Attached:
        channel, other = socket.socketpair()
        other.close()
        return Attached(HELD, channel, self.connect(), os.open("/dev/null", os.O_RDONLY))

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        for fd in self.kept:
            os.close(fd)


HELD = Held(ID, "gvisor", 2, 2, "", 100, None, True, True, True)


def writes(*pieces: bytes, answer: bytes = OK, close: bool = True, early: bool = False) -> Tar:
    async def tar(sentry: Sentry, end: socket.socket, fd: int) -> None:
        loop = asyncio.get_running_loop()
        if early:
            await loop.sock_sendall(end, answer)
        sentry.kept.append(fd)
        for piece in pieces:
            await asyncio.to_thread(os.write, fd, piece)
        if close:
            sentry.kept.remove(fd)
            os.close(fd)
        if not early:
            await loop.sock_sendall(end, answer)

    return tar


async def floods(sentry: Sentry, end: socket.socket, fd: int) -> None:
    def flood() -> None:
        try:
            while True:
                os.write(fd, b"x" * 65536)
        except BrokenPipeError:
            os.close(fd)

    await asyncio.to_thread(flood)


async def hangs_up(sentry: Sentry, end: socket.socket, fd: int) -> None:
    os.write(fd, b"half")
    os.close(fd)
    end.close()


async def is_silent(sentry: Sentry, end: socket.socket, fd: int) -> None:
    os.close(fd)
    await asyncio.sleep(600)


async def never_ends(sentry: Sentry, end: socket.socket, fd: int) -> None:
    try:
        await asyncio.sleep(600)
    finally:
        os.close(fd)


async def drips(sentry: Sentry, end: socket.socket, fd: int) -> None:
    try:
        while True:
            os.write(fd, b"x")
            await asyncio.sleep(0.01)
    finally:
        os.close(fd)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CALL_S", 0.5)
    monkeypatch.setattr(export, "CALL_S", 0.5)
    monkeypatch.setattr(export, "STALL_S", 0.5)
    monkeypatch.setattr(export, "EXPORT_S", 1.5)


async def exported(sentry: Sentry, sink: int, bytes_max: int = 1 << 20) -> int:
    channel, other = socket.socketpair()
    pidfd = os.open("/dev/null", os.O_RDONLY)
    report = IsolationReport("gvisor", "gvisor", "", "", 100, None)
    instance = GVisorInstance(
        Attached(HELD, channel, sentry.connect(), pidfd), report, lambda: cast(KeeperClient, sentry)
    )
    try:
        return await instance.export_upper(sink, bytes_max=bytes_max)
    finally:
        instance._control.close()
        await sentry.end()
        for end in (channel, other):
            end.close()
        os.close(pidfd)


def descriptors() -> set[str]:
    return {f"{name} {os.readlink(f'/proc/self/fd/{name}')}" for name in os.listdir("/proc/self/fd") if _is_open(name)}


def _is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


async def outcome(tar: Tar, path: Path, bytes_max: int = 1 << 20, **answers: bytes) -> tuple[Sentry, EngineError]:
    """The failure; it came soon, and left neither a descriptor nor a thread that waits."""
    sentry = Sentry(tar, **answers)
    await asyncio.to_thread(int)  # the pool's first thread is there before descriptors are counted
    before, began = descriptors(), time.monotonic()
    sink = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        with pytest.raises(EngineError) as caught:
            await exported(sentry, sink, bytes_max)
    finally:
        os.close(sink)
    assert time.monotonic() - began < 10
    deadline = time.monotonic() + 5
    while not descriptors() <= before:  # the sentry's own thread notices a moment later
        assert time.monotonic() < deadline, descriptors() - before
        await asyncio.sleep(0.01)
    return sentry, caught.value


async def test_an_honest_sentry(tmp_path: Path) -> None:
    sentry = Sentry(writes(b"a" * 1000, b"b" * 60000))
    with open(tmp_path / "sink", "wb") as sink:
        assert await exported(sentry, sink.fileno()) == 61000
    assert (tmp_path / "sink").read_bytes() == b"a" * 1000 + b"b" * 60000
    assert sentry.asked == ["Pause", "TarRootfsUpperLayer", "Resume"]
    assert sentry.connections == 1


async def test_an_answer_before_the_bytes_is_waited_out(tmp_path: Path) -> None:
    sentry = Sentry(writes(b"a" * 1000, b"b", early=True))
    with open(tmp_path / "sink", "wb") as sink:
        assert await exported(sentry, sink.fileno()) == 1001


async def test_exactly_the_limit_fits(tmp_path: Path) -> None:
    with open(tmp_path / "sink", "wb") as sink:
        assert await exported(Sentry(writes(b"a" * 1000)), sink.fileno(), 1000) == 1000


@pytest.mark.parametrize(
    ("tar", "code"),
    [
        (floods, "too_large"),
        (writes(b"a" * 1001), "too_large"),
        (hangs_up, "host_failure"),
        (is_silent, "unresponsive"),
        (never_ends, "unresponsive"),
        (drips, "unresponsive"),
        (writes(b"a", close=False), "unresponsive"),
        (writes(answer=b'{"success":false,"err":"no \\u001b[31m"}'), "host_failure"),
        (writes(answer=b"}"), "protocol_error"),
        (writes(answer=b"[" * 100), "protocol_error"),
        (writes(answer=b'{"success":'), "unresponsive"),
    ],
    ids=["floods", "one too many", "hangs up", "silent", "never ends", "drips", "keeps the pipe", "refuses", "no json",
         "deep", "half an answer"],
)  # fmt: skip
async def test_lies_end_soon_and_the_guest_goes_on(tar: Tar, code: str, tmp_path: Path) -> None:
    sentry, bad = await outcome(tar, tmp_path / "sink", bytes_max=1000)
    assert bad.code == code
    assert str(bad).isprintable()
    assert sentry.asked == ["Pause", "TarRootfsUpperLayer", "Resume"]
    assert (tmp_path / "sink").stat().st_size <= 1001


async def test_a_refused_pause_is_not_resumed(tmp_path: Path) -> None:
    """Resuming what was not paused makes a sentry panic."""
    sentry, bad = await outcome(writes(), tmp_path / "sink", pause=b'{"success":false,"err":"no"}')
    assert bad.code == "host_failure"
    assert sentry.asked == ["Pause"]


async def test_a_pause_without_an_answer_is_resumed(tmp_path: Path) -> None:
    sentry, bad = await outcome(writes(), tmp_path / "sink", pause=b'{"success":')
    assert bad.code == "unresponsive"
    assert sentry.asked == ["Pause", "Resume"]
    assert sentry.connections == 2


async def test_a_resume_that_fails_is_told(tmp_path: Path) -> None:
    _, bad = await outcome(writes(b"a"), tmp_path / "sink", resume=b'{"success":false,"err":"stuck"}')
    assert bad.code == "host_failure"
    assert "Resume" in str(bad)


async def test_a_cancelled_export_is_resumed() -> None:
    """Into a pipe that nobody reads."""
    sentry = Sentry(floods)
    source, sink = os.pipe()
    task = asyncio.create_task(exported(sentry, sink, 1 << 40))
    await asyncio.to_thread(os.read, source, 1)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert sentry.asked == ["Pause", "TarRootfsUpperLayer", "Resume"]
    os.close(source)
    os.close(sink)


async def test_the_loop_goes_on_meanwhile() -> None:
    slowest, beats = 0.0, 0

    async def beat() -> None:
        nonlocal slowest, beats
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0)
            slowest, beats = max(slowest, time.perf_counter() - before), beats + 1

    beating = asyncio.create_task(beat())
    with open("/dev/null", "wb") as sink, pytest.raises(EngineError):
        await exported(Sentry(floods), sink.fileno(), 1 << 30)
    beating.cancel()
    assert beats > 10
    assert slowest < 0.5
