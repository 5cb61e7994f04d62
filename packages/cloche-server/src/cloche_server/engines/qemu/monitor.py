"""A client of QEMU's monitor (QMP) that believes nothing: every answer is bounded in bytes and in time.

A question carries an id of its own, and whatever does not answer it is dropped: the greeting, events, and what an
earlier daemon asked on the same socket. So one socket serves any number of daemons, one after the other.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from typing import Any, Final

from cloche_server.engines.contract import EngineError

ANSWER_S_MAX: Final = 10.0
LINE_BYTES_MAX: Final = 64 * 1024
SKIPPED_BYTES_MAX: Final = 1024 * 1024
"""How much a VMM may say, in all, before it answers one question."""
READ_BYTES: Final = 16 * 1024
TEXT_SHOWN_MAX: Final = 200


class MonitorError(EngineError):
    """The monitor did not answer, or not in its language, or refused. `kind` is QMP's class of the refusal."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__("host_failure", f"qemu's monitor: {message}")
        self.kind = kind


class Monitor:
    """One monitor socket. Questions are asked one at a time."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._unread = bytearray()
        self._negotiated = False
        self._turn = asyncio.Lock()

    async def ask(self, command: str) -> Any:
        """The answer's `return`. MonitorError on anything else."""
        try:
            async with self._turn, asyncio.timeout(ANSWER_S_MAX):
                if not self._negotiated:
                    await self._negotiate()
                return await self._exchange(command, b"")
        except TimeoutError:
            raise MonitorError(f"no answer to {command} in {ANSWER_S_MAX:g} s") from None
        except OSError as error:
            raise MonitorError(f"{command}: {error.strerror or error}") from None

    def close(self) -> None:
        self._connection.close()

    async def _negotiate(self) -> None:
        # 0xff is in no JSON text: it ends whatever half question a killed daemon left in QEMU's parser.
        try:
            await self._exchange("qmp_capabilities", b"\xff")
        except MonitorError as error:
            if error.kind != "CommandNotFound":  # that is: an earlier daemon did it
                raise
        self._negotiated = True

    async def _exchange(self, command: str, before: bytes) -> Any:
        ticket = secrets.token_hex(8)
        question = json.dumps({"execute": command, "id": ticket}).encode()
        await asyncio.get_running_loop().sock_sendall(self._connection, before + question + b"\n")
        skipped = 0
        while True:
            line = await self._line()
            skipped += len(line)
            if skipped > SKIPPED_BYTES_MAX:
                raise MonitorError(f"more than {SKIPPED_BYTES_MAX} bytes before an answer to {command}")
            answer = _document(line)
            if answer.get("id") != ticket:
                continue
            if "return" in answer:
                return answer["return"]
            refusal = answer.get("error")
            shown = refusal if isinstance(refusal, dict) else {}
            description = repr(str(shown.get("desc"))[:TEXT_SHOWN_MAX])
            raise MonitorError(f"{command} was refused: {description}", str(shown.get("class"))[:TEXT_SHOWN_MAX])

    async def _line(self) -> bytes:
        while True:
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                return bytes(line)
            if len(self._unread) > LINE_BYTES_MAX:
                raise MonitorError(f"a line of more than {LINE_BYTES_MAX} bytes")
            read = await asyncio.get_running_loop().sock_recv(self._connection, READ_BYTES)
            if not read:
                raise MonitorError("closed")
            self._unread += read


def _document(line: bytes) -> dict[str, Any]:
    """What is not a JSON object answers nothing: a predecessor may have read the first half of this line."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
