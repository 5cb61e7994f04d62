"""What the tests of interception share: the double as a plain child process, a gate's side that remembers, a box."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

from cloche.wire.ids import DEFAULT_TENANT
from cloche_server.egress.interception.environment import Environment
from cloche_server.egress.services import Who
from cloche_server.policy.model import Decision, Effect, Target

DOUBLE = Path(__file__).with_name("double.py")
LINEAGE = "l" + "0" * 19
WHO = Who("s" + "0" * 19, "uid:0", DEFAULT_TENANT, LINEAGE)


class Child:
    """A process that is started as the keeper would, without its walls (those are the promises' business)."""

    def __init__(self, *argv: str) -> None:
        self.channel, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            argv, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={"PATH": "/usr/bin:/bin"}
        )
        theirs.close()
        self._dead: asyncio.Future[None] | None = None
        self.pidfd = os.pidfd_open(self.process.pid)
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        self.kills = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def last_words(self) -> str:
        assert self.process.stderr is not None
        return (self.process.stderr.read() or b"").decode(errors="replace")

    async def wait_dead(self) -> None:
        if self._dead is None:
            self._dead = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().add_reader(self.pidfd, self._died)
        await asyncio.shield(self._dead)

    def _died(self) -> None:
        asyncio.get_running_loop().remove_reader(self.pidfd)
        assert self._dead is not None
        self._dead.set_result(None)

    async def kill(self) -> int:
        self.kills += 1
        self.process.kill()
        await self.wait_dead()
        self.process.wait()
        self.channel.close()
        return 0


class Starter:
    """Starts doubles, and remembers them."""

    def __init__(self, program: Path = DOUBLE) -> None:
        self.program = program
        self.started: list[Child] = []
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, *, tenant: str, environment: str) -> Child:
        self.asked.append((tenant, environment))
        self.started.append(Child(sys.executable, "-I", "-S", str(self.program)))
        return self.started[-1]


class GateSide:
    """A gate's side of one connection, which remembers what it was asked and told."""

    def __init__(self, upstream: socket.socket | None = None, *, allow: bool = True) -> None:
        self.upstream = upstream
        self.allow = allow
        self.seen: list[tuple[object, ...]] = []
        self.over = asyncio.Event()

    async def dial(self) -> socket.socket:
        self.seen.append(("dial",))
        if self.upstream is None:
            raise OSError(101, "Network is unreachable")
        return self.upstream

    async def request(self, method: str, path: str) -> Decision:
        self.seen.append(("request", method, path))
        if path == "/wait":
            await asyncio.Event().wait()
        if path == "/broken":
            raise ZeroDivisionError
        effect = Effect.ALLOW if self.allow else Effect.DENY
        return Decision(effect, "egress[0]", "allowed" if self.allow else "path_not_allowed", "as it is")

    def alert(self, kind: str, where: str, secret: str) -> None:
        self.seen.append(("alert", kind, where, secret))

    def denied(self, code: str, text: str, method: str | None, path: str | None) -> None:
        self.seen.append(("denied", code, text, method, path))

    def closed(self) -> None:
        self.seen.append(("closed",))
        self.over.set()


class Ready(Environment):
    """An environment that is there."""

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"), None)

    async def ready(self, progress: object = None) -> str:
        return "3.13-" + "0" * 64


class PlainBox:
    """Seals so that a test can see that it was asked to."""

    def seal(self, data: bytes, about: bytes) -> bytes:
        return about + b":" + bytes(byte ^ 0x5A for byte in data)

    def open(self, sealed: bytes, about: bytes) -> bytes:
        assert sealed.startswith(about + b":")
        return bytes(byte ^ 0x5A for byte in sealed[len(about) + 1 :])


def target(host: str, port: int = 443) -> Target:
    return Target(host, port)


async def received(end: socket.socket, count: int = 1 << 16) -> bytes:
    async with asyncio.timeout(10):
        return await asyncio.get_running_loop().sock_recv(end, count)
