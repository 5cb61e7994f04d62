"""The daemon's side of the keeper's socket: one connection, many requests in flight, descriptors with answers.

Standard library only. The keeper process does not load this module.
"""

from __future__ import annotations

import array
import asyncio
import itertools
import json
import os
import socket
from dataclasses import dataclass
from typing import Any, Final

from cloche_server.engines.spec import SandboxSpec
from cloche_server.keeper.cgroups import Cgroup
from cloche_server.keeper.verbs import DESCRIPTORS_MAX, GENERATION, MESSAGE_BYTES_MAX

ANSWER_S: Final = 60.0
"""Longer than any verb takes by its own limits: a keeper that is silent for so long is stuck."""
SEND_S: Final = 10.0


class KeeperRefused(Exception):
    """The keeper said no; `code` is from its closed list (`keeper.verbs`)."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class KeeperGone(Exception):
    """There is no keeper at the other end any more. Sandboxes go on; ask again after a successor is there."""


@dataclass(frozen=True)
class Held:
    """One sandbox, as the keeper knows it."""

    id: str
    engine: str
    pid: int
    start_time: int
    boot_id: str
    host_uid: int
    cgroup: Cgroup | None
    alive: bool
    channel: bool
    sealed: bool

    @classmethod
    def from_object(cls, value: dict[str, Any]) -> Held:
        cgroup = None if value["cgroup"] is None else Cgroup.from_object(value["cgroup"])
        return cls(**{**value, "cgroup": cgroup})


@dataclass(frozen=True)
class Attached:
    """A sandbox and the daemon's own copies of its descriptors."""

    held: Held
    channel: socket.socket
    control: socket.socket
    """Of a converter, which has none: its log."""
    pidfd: int


@dataclass(frozen=True)
class Ended:
    """How a sandbox ended, as the keeper saw it."""

    oom_kills: int
    status: int | None


class KeeperClient:
    """Speaks with one keeper process. After `KeeperGone` it is of no more use."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self._sending = asyncio.Lock()
        self.facts: dict[str, Any] = {}
        self.gone = asyncio.Event()
        self._loop.add_reader(connection, self._readable)

    @classmethod
    async def connect(cls, path: str) -> KeeperClient:
        """OSError when nobody listens; KeeperRefused (`busy`) when another daemon lives."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        directory = -1
        try:
            directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            connection.connect(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
        except OSError:
            connection.close()
            raise
        finally:
            if directory >= 0:
                os.close(directory)
        client = cls(connection)
        try:
            client.facts, _ = await client._ask("hello", generation=GENERATION)
        except BaseException:
            client.close()
            raise
        return client

    @property
    def pid(self) -> int:
        return int(self.facts["pid"])

    async def boot(self, spec: SandboxSpec) -> Attached:
        return _attached(*await self._ask("boot", spec=json.loads(spec.to_json())))

    async def attach(self, sandbox: str) -> Attached:
        return _attached(*await self._ask("attach", sandbox=sandbox))

    async def everything(self) -> list[Held]:
        """What lives, and what died and was not ended yet."""
        held: list[Held] = []
        more = True
        while more:
            result, _ = await self._ask("list", after=held[-1].id if held else "")
            held += [Held.from_object(row) for row in result["sandboxes"]]
            more = result["more"]
        return held

    async def adopt(self, sandbox: str, channel: socket.socket) -> Held:
        result, _ = await self._ask("adopt", [channel.fileno()], sandbox=sandbox)
        return Held.from_object(result)

    async def seal(self, sandbox: str) -> None:
        await self._ask("seal", sandbox=sandbox)

    async def kill(self, sandbox: str) -> Ended:
        """Also for one that the keeper does not know: then there is nothing left to end."""
        try:
            result, _ = await self._ask("kill", sandbox=sandbox)
        except KeeperRefused as error:
            if error.code != "not_found":
                raise
            return Ended(0, None)
        return Ended(result["oom_kills"], result["status"])

    async def stop(self, *, purge: bool = False) -> None:
        """The keeper ends; sandboxes stay. With `purge` (refused while there are any) its directory goes too."""
        try:
            await self._ask("stop", purge=purge)
        except KeeperGone:
            return
        await self.gone.wait()

    def close(self) -> None:
        if self._connection.fileno() >= 0:
            self._loop.remove_reader(self._connection)
            self._connection.close()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(KeeperGone("the keeper is gone"))
        self._pending.clear()
        self.gone.set()

    async def _ask(self, verb: str, fds: list[int] | None = None, **fields: Any) -> tuple[dict[str, Any], list[int]]:
        if self.gone.is_set():
            raise KeeperGone("the keeper is gone")
        request = next(self._ids)
        future: asyncio.Future[tuple[dict[str, Any], list[int]]] = self._loop.create_future()
        self._pending[request] = future
        try:
            message = json.dumps({"id": request, "verb": verb, **fields}, separators=(",", ":")).encode()
            assert len(message) <= MESSAGE_BYTES_MAX
            await self._send(message, fds or [])
            async with asyncio.timeout(ANSWER_S):
                return await future
        except TimeoutError:
            self.close()
            raise KeeperGone(f"the keeper did not answer {verb} in {ANSWER_S:.0f} s") from None
        finally:
            self._pending.pop(request, None)

    async def _send(self, message: bytes, fds: list[int]) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        async with self._sending, asyncio.timeout(SEND_S):
            while True:
                try:
                    self._connection.sendmsg([message], ancillary, socket.MSG_NOSIGNAL)
                    return
                except BlockingIOError:
                    await asyncio.sleep(0.001)
                except OSError as error:
                    self.close()
                    raise KeeperGone(f"the keeper is gone: {error.strerror}") from None

    def _readable(self) -> None:
        while self._connection.fileno() >= 0:
            try:
                data, ancillary, _, _ = self._connection.recvmsg(
                    MESSAGE_BYTES_MAX, socket.CMSG_SPACE(4 * DESCRIPTORS_MAX), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            fds = array.array("i")
            for level, kind, raw in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
            if not data:
                self.close()
                return
            self._answered(json.loads(data), list(fds))

    def _answered(self, message: dict[str, Any], fds: list[int]) -> None:
        future = self._pending.get(message["id"])
        if future is None or future.done():  # its asker was cancelled
            for fd in fds:
                os.close(fd)
        elif "error" in message:
            future.set_exception(KeeperRefused(message["error"]["code"], message["error"]["message"]))
        else:
            future.set_result((message["ok"], fds))


def _attached(result: dict[str, Any], fds: list[int]) -> Attached:
    channel, control, pidfd = fds
    return Attached(Held.from_object(result), socket.socket(fileno=channel), socket.socket(fileno=control), pidfd)
