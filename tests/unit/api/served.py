"""The API over the memory backend on a real socket, in a thread; and a bad line in front of it that breaks."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

from cloche_server.api.caller import TcpConfig
from cloche_server.api.server import serve
from tests.unit.api.memory import MemoryBackend

START_S_MAX = 20.0


class Served:
    def __init__(self, folder: Path, tcp: TcpConfig | None = None, admin_uids: frozenset[int] | None = None) -> None:
        self.socket = folder / "api.sock"
        self.backend = MemoryBackend()
        self._tcp = tcp
        self._admin_uids = admin_uids
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> Served:
        self._thread.start()
        assert self._ready.wait(START_S_MAX)
        if self.failure is not None:
            raise self.failure
        return self

    def stop(self) -> None:
        assert self._loop is not None
        assert self._task is not None
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(START_S_MAX)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as raised:  # raised again by start()
            self.failure = raised
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(
            serve(
                self.backend,
                socket_path=self.socket,
                socket_mode=0o666,
                tcp=self._tcp,
                on_ready=self._ready.set,
                admin_uids=self._admin_uids,
            )
        )
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


@contextlib.contextmanager
def served(folder: Path, tcp: TcpConfig | None = None, admin_uids: frozenset[int] | None = None) -> Iterator[Served]:
    one = Served(folder, tcp, admin_uids).start()
    try:
        yield one
    finally:
        one.stop()


class BadLine:
    """Passes bytes both ways and breaks each connection after a random number of them."""

    def __init__(self, folder: Path, target: Path, seed: int, least: int, most: int) -> None:
        self.socket = folder / "bad.sock"
        self.broken = 0
        self._target = target
        self._dice = random.Random(seed)
        self._least, self._most = least, most
        self._ready = threading.Event()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def __enter__(self) -> BadLine:
        self._thread.start()
        assert self._ready.wait(START_S_MAX)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_S_MAX)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_unix_server(self._connected, self.socket)
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(str(self._target))
        left = self._dice.randint(self._least, self._most)
        up = asyncio.ensure_future(_copy(reader, up_writer))
        try:
            while left >= 0 and (data := await up_reader.read(65536)):
                writer.write(data[:left])
                await writer.drain()
                left -= len(data)
            self.broken += left < 0  # a line that gives up after the very last byte broke nothing
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            up.cancel()
            writer.transport.abort()
            up_writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
