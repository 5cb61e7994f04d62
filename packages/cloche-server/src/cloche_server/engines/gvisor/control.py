"""The sentry's control socket, from the daemon: SetNetworkArgs, StartRoot, Pause, Resume, Processes, TarRootfsUpperLayer.

A sentry's answers are a guest's word: bounded in bytes, time and nesting, and never awaited without a limit. One
call at a time on the connection; after a failure of form or time the connection is closed and stays so.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import re
import socket
from typing import Any, Final

from cloche_server.engines.contract import EngineError

ANSWER_BYTES_MAX: Final = 1 << 20
CALL_S: Final = 10.0
START_S: Final = 30.0
DEPTH_MAX: Final = 32
TEXT_MAX: Final = 300
STARTING: Final = ("containerManager.SetNetworkArgs", "containerManager.StartRoot")
LOOPBACK: Final = {
    "Name": "lo",
    "Addresses": [{"Address": "127.0.0.1", "PrefixLen": 8}, {"Address": "::1", "PrefixLen": 128}],
    # Masks as Go writes bytes in JSON: base64.
    "Routes": [
        {"Destination": {"IP": "127.0.0.0", "Mask": "/wAAAA=="}},
        {"Destination": {"IP": "::1", "Mask": "/////////////////////w=="}},
    ],
}
"""The only interface of a guest; runsc's own default."""
_OUTSIDE: Final = re.compile(rb'["{}\[\]]')
_IN_STRING: Final = re.compile(rb'["\\]')


class Control:
    """One connection to one sentry."""

    def __init__(self, connection: socket.socket, sandbox: str) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._sandbox = sandbox
        self._lock = asyncio.Lock()

    def close(self) -> None:
        self._connection.close()

    async def start_root(self) -> None:
        # What `runsc start` does first: without it the guest has no loopback at all.
        await self._call("containerManager.SetNetworkArgs", {"LoopbackLinks": [LOOPBACK]}, CALL_S)
        await self._call("containerManager.StartRoot", self._sandbox, START_S)

    async def pause(self) -> None:
        await self._call("containerManager.Pause", None, CALL_S)

    async def resume(self) -> None:
        await self._call("containerManager.Resume", None, CALL_S)

    async def processes(self) -> int:
        """How many processes the guest says it has."""
        found = await self._call("containerManager.Processes", self._sandbox, CALL_S)
        return len(found) if isinstance(found, list) else 0

    async def tar_upper(self, target_fd: int, seconds: float) -> None:
        """Returns when the sentry says that it has written all. The descriptor is the sentry's then, and closed here."""
        target = Passed(target_fd)
        try:
            await self._call("Fs.TarRootfsUpperLayer", {"ContainerID": ""}, seconds, target)
        finally:
            target.close()

    @property
    def is_closed(self) -> bool:
        return self._connection.fileno() < 0

    async def _call(self, method: str, argument: Any, seconds: float, passed: Passed | None = None) -> Any:
        async with self._lock:
            if self.is_closed:
                raise EngineError("host_failure", "the engine's control connection is closed")
            try:
                async with asyncio.timeout(seconds):
                    answer = await self._exchange(method, argument, passed)
            except TimeoutError:
                self.close()
                raise EngineError("unresponsive", f"the engine did not answer {method} in {seconds:.0f} s") from None
            except OSError as error:
                self.close()
                raise EngineError("host_failure", f"the engine's control connection broke: {error}") from None
            except BaseException:
                # Half an answer may stand in the socket: the next caller must not read it as its own.
                self.close()
                raise
        return _result(method, answer)

    async def _exchange(self, method: str, argument: Any, passed: Passed | None) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        message = json.dumps({"method": method, "arg": argument}).encode()
        if passed is not None:
            message = message[passed.send(self._connection, message) :]
            passed.close()  # or the pipe's end would never be seen
        await loop.sock_sendall(self._connection, message)
        collected = bytearray()
        ending = Ending()
        while True:
            data = await loop.sock_recv(self._connection, 1 << 16)
            if not data:
                raise EngineError("host_failure", f"the engine closed its control connection during {method}")
            collected += data
            if len(collected) > ANSWER_BYTES_MAX:
                raise EngineError("protocol_error", f"the engine's answer to {method} has no end")
            if ending.reached(data):
                return _object(bytes(collected))
            await asyncio.sleep(0)  # a sentry that sends without a pause must not keep the loop to itself


class Passed:
    """A descriptor on its way to the sentry."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def send(self, connection: socket.socket, message: bytes) -> int:
        """How much of the message went with it. One call is under way at a time, so there is room for its beginning."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._fd]))
        return connection.sendmsg([message], [rights], socket.MSG_NOSIGNAL)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Ending:
    """Finds where a JSON object ends, looking at each byte once: parsing anew after every piece would be quadratic."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def reached(self, data: bytes) -> bool:
        """Whether the object is whole with this piece. EngineError when it nests too deeply or is no object."""
        at = 0
        while at < len(data):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(data, at)
            if found is None:
                return False
            at = found.end()
            if self._take(found[0]):
                return True
        return False

    def _take(self, mark: bytes) -> bool:
        if mark == b"\\":
            self._escaped = True
        elif mark == b'"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if mark in (b"{", b"[") else -1
            if not 0 <= self._depth <= DEPTH_MAX:
                raise EngineError("protocol_error", "the engine's answer nests too deeply or is not JSON")
            return self._depth == 0
        return False


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise EngineError("protocol_error", "the engine's answer is not JSON") from None
    if not isinstance(value, dict):
        raise EngineError("protocol_error", "the engine's answer is not an object")
    return value


def _result(method: str, answer: dict[str, Any]) -> Any:
    if answer.get("success") is not True:
        reason = str(answer.get("err", ""))[:TEXT_MAX]
        raise EngineError("create_failed" if method in STARTING else "host_failure", f"{method}: {reason!a}")
    return answer.get("result")
