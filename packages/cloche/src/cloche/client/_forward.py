"""A local port that forwards to one inside. One thread with a loop of its own, for sync and async callers alike."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import TracebackType
from typing import Final

from cloche.client._target import Target
from cloche.wire.errors import ClocheError, error
from cloche.wire.ids import short

READ_BYTES: Final = 256 * 1024
CONNECTIONS_MAX: Final = 256
START_S_MAX: Final = 10.0


class Forward:
    """Listens on 127.0.0.1 until it is closed; `last_error` is why a connection could not be made."""

    def __init__(self, target: Target, sandbox: str, port: int, local_port: int = 0) -> None:
        self.port = port
        self.local_port = local_port
        self.last_error: ClocheError | None = None
        self._target = target
        self._sandbox = sandbox
        self._started = threading.Event()
        self._failure: OSError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name=f"cloche-forward-{port}", daemon=True)
        self._thread.start()
        self._started.wait(START_S_MAX)
        if self._failure is not None:
            raise error(
                "conflict",
                f"127.0.0.1:{local_port} can't be listened on: {self._failure.strerror}.",
                fix="Choose another local port, or 0 for any.",
            )

    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", self.local_port)

    def close(self) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop may just have ended
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_S_MAX)

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Forward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Forward:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        state = "open" if self._thread.is_alive() else "closed"
        return f"<Forward 127.0.0.1:{self.local_port} -> {self.port} in {short(self._sandbox)} {state}>"

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as raised:
            self._failure = raised
        finally:
            self._started.set()

    async def _serve(self) -> None:
        from cloche.client._async.transport import AsyncTransport

        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        transport = AsyncTransport(self._target)
        slots = asyncio.Semaphore(CONNECTIONS_MAX)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.CancelledError):  # the forward is being closed
                async with slots:
                    await self._couple(transport, reader, writer)

        server = await asyncio.start_server(connected, "127.0.0.1", self.local_port, limit=READ_BYTES)
        self.local_port = server.sockets[0].getsockname()[1]
        self._started.set()
        async with server:
            await self._stop.wait()

    async def _couple(self, transport: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from cloche.client._async.ports import AsyncPorts
        from cloche.client._async.transport import AsyncTransport

        assert isinstance(transport, AsyncTransport)
        try:
            async with await AsyncPorts(transport, self._sandbox).connect(self.port) as inside:
                up = asyncio.ensure_future(_up(reader, inside))
                down = asyncio.ensure_future(_down(inside, writer))
                try:
                    await asyncio.gather(up, down)
                finally:
                    up.cancel()
                    down.cancel()
        except ClocheError as raised:
            self.last_error = raised
        except OSError:
            return  # the local side broke off
        finally:
            writer.close()


async def _up(reader: asyncio.StreamReader, inside: object) -> None:
    from cloche.client._async.ports import AsyncPortConnection

    assert isinstance(inside, AsyncPortConnection)
    while data := await reader.read(READ_BYTES):
        await inside.send(data)
    await inside.send_eof()


async def _down(inside: object, writer: asyncio.StreamWriter) -> None:
    from cloche.client._async.ports import AsyncPortConnection

    assert isinstance(inside, AsyncPortConnection)
    while data := await inside.receive():
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
