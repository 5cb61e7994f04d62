"""The application, and the listeners it is served on: a unix socket always, TCP when asked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.telemetry import TelemetryConfig
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from cloche_server.api import (
    approvals,
    commands,
    egress,
    events,
    files,
    images,
    node,
    output,
    ports,
    sandboxes,
    secrets,
    stdin,
    terminal,
    tree,
)
from cloche_server.api.asking import Direct, Gate
from cloche_server.api.backend import Backend
from cloche_server.api.caller import Rules, TcpConfig, check_tcp, make_rules
from cloche_server.api.openapi import render
from cloche_server.api.peer import PeerHttpProtocol, PeerWebSocketProtocol
from cloche_server.api.problems import Boundary

KEEP_ALIVE_S: Final = 75
STOP_S: Final = 1
"""How long a stopping server waits for answers under way; followers resume at its successor."""
BACKLOG: Final = 1024
WS_MESSAGE_BYTES_MAX: Final = 1024 * 1024
NO_TELEMETRY: Final[TelemetryConfig] = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}
"""Not even asked for at each request, and no variable of the environment turns it on."""

ROUTERS: Final[tuple[APIRouter, ...]] = (
    commands.hot,
    output.router,
    sandboxes.router,
    commands.router,
    stdin.router,
    files.router,
    tree.router,
    egress.router,
    secrets.router,
    approvals.router,
    images.router,
    node.router,
    events.router,
    terminal.router,
    ports.router,
)

log = logging.getLogger("cloche.api")


class Api(FastAPI):
    """FastAPI with our own stack: the framework's error pages and telemetry never come to pass."""

    def __init__(self, backend: Backend, rules: Rules) -> None:
        super().__init__(
            openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=NO_TELEMETRY
        )
        self.backend = backend
        self.rules = rules
        for router in ROUTERS:
            self.router.routes.extend(router.routes)
        self.add_route("/openapi.json", self._description, include_in_schema=False)
        self._rendered: str | None = None

    def build_middleware_stack(self) -> ASGIApp:
        inner = Direct(AsyncExitStackMiddleware(self.router), self.router.routes)
        return Boundary(Gate(inner, self.backend, self.rules))

    async def _description(self, _request: Request) -> Response:
        if self._rendered is None:
            self._rendered = render(self)
        return Response(self._rendered, media_type="application/json")


def make_app(backend: Backend, config: Rules) -> Api:
    return Api(backend, config)


async def serve(
    backend: Backend,
    *,
    socket_path: Path,
    socket_mode: int,
    tcp: TcpConfig | None = None,
    on_ready: Callable[[], None] | None = None,
    admin_uids: frozenset[int] | None = None,
) -> None:
    """Serves until cancelled. `admin_uids` None: root and the user this process runs as see everything.

    The socket appears at its path whole: bound under another name, given its mode, then moved into place.
    """
    if tcp is not None:
        check_tcp(tcp)
    app = make_app(backend, make_rules(tcp, admin_uids))
    async with contextlib.AsyncExitStack() as stack:
        unix = stack.enter_context(_unix_listener(socket_path, socket_mode))
        await stack.enter_async_context(_listening(app, unix, None))
        if tcp is not None:
            await stack.enter_async_context(_listening(app, _tcp_listener(tcp), tcp))
        gc.freeze()  # what exists now stays: no collection need look at it again, and hardly any of it is garbage
        gc.enable()
        if on_ready is not None:
            on_ready()
        await asyncio.Event().wait()


@contextlib.contextmanager
def _unix_listener(path: Path, mode: int) -> Iterator[socket.socket]:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(str(fresh))
        fresh.chmod(mode)
        inode = fresh.stat().st_ino
        listener.listen(BACKLOG)
        fresh.rename(path)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if path.stat().st_ino == inode:  # a successor may stand there already
                    path.unlink()
    finally:
        fresh.unlink(missing_ok=True)
        listener.close()


def _tcp_listener(tcp: TcpConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in tcp.host else socket.AF_INET
    listener = socket.create_server((tcp.host, tcp.port), family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return listener


@contextlib.asynccontextmanager
async def _listening(app: Api, listener: socket.socket, tcp: TcpConfig | None) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app,
        http=PeerHttpProtocol,
        ws=PeerWebSocketProtocol,
        ws_max_size=WS_MESSAGE_BYTES_MAX,
        ws_per_message_deflate=False,
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="critical",  # what matters is logged by the boundary; the rest a client could fill a disk with
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
        ssl_certfile=tcp.tls_certificate if tcp else None,
        ssl_keyfile=tcp.tls_key if tcp else None,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    try:
        yield
    finally:
        await server.shutdown(sockets=[listener])
