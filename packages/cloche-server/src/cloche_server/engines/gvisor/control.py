"""The sentry's control socket, from the daemon: StartRoot, Pause, Resume, Processes.

A sentry's answers are a guest's word: bounded in bytes, time and nesting, and never awaited without a limit. One
call at a time on the connection; after a failure of form or time the connection is closed and stays so.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any, Final

from cloche_server.engines.contract import EngineError

ANSWER_BYTES_MAX: Final = 1 << 20
CALL_S: Final = 10.0
START_S: Final = 30.0
DEPTH_MAX: Final = 32
TEXT_MAX: Final = 300


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
        await self._call("containerManager.StartRoot", self._sandbox, START_S)

    async def pause(self) -> None:
        await self._call("containerManager.Pause", None, CALL_S)

    async def resume(self) -> None:
        await self._call("containerManager.Resume", None, CALL_S)

    async def processes(self) -> int:
        """How many processes the guest says it has."""
        found = await self._call("containerManager.Processes", self._sandbox, CALL_S)
        return len(found) if isinstance(found, list) else 0

    async def _call(self, method: str, argument: Any, seconds: float) -> Any:
        async with self._lock:
            if self._connection.fileno() < 0:
                raise EngineError("host_failure", "the engine's control connection is closed")
            try:
                async with asyncio.timeout(seconds):
                    return await self._exchange(method, argument)
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

    async def _exchange(self, method: str, argument: Any) -> Any:
        loop = asyncio.get_running_loop()
        message = json.dumps({"method": method, "arg": argument}).encode()
        await loop.sock_sendall(self._connection, message)
        collected = bytearray()
        while True:
            data = await loop.sock_recv(self._connection, 1 << 16)
            if not data:
                raise EngineError("host_failure", f"the engine closed its control connection during {method}")
            collected += data
            if len(collected) > ANSWER_BYTES_MAX:
                raise EngineError("protocol_error", f"the engine's answer to {method} has no end")
            if data.rstrip()[-1:] == b"}" and (answer := _whole(bytes(collected))) is not None:
                return _result(method, answer)


def _whole(data: bytes) -> dict[str, Any] | None:
    """The answer, or None while it may still go on."""
    if data.count(b"{") + data.count(b"[") > 100_000 or _depth(data) > DEPTH_MAX:
        raise EngineError("protocol_error", "the engine's answer nests too deeply")
    try:
        value = json.loads(data)
    except ValueError:
        return None
    if not isinstance(value, dict):
        raise EngineError("protocol_error", "the engine's answer is not an object")
    return value


def _depth(data: bytes) -> int:
    """An upper bound of the nesting, strings not excluded: cheap, and an honest answer is far below the limit."""
    deepest = depth = 0
    for byte in data if len(data) < 4096 else data[:65536]:
        if byte in b"{[":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"}]":
            depth -= 1
    return deepest


def _result(method: str, answer: dict[str, Any]) -> Any:
    if answer.get("success") is not True:
        reason = str(answer.get("err", ""))[:TEXT_MAX]
        raise EngineError("create_failed", f"{method}: {reason!a}")
    return answer.get("result")
