"""The API over real rooms of secrets and approvals, with a real journal, on a real socket, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from cloche_server.api.caller import TcpConfig
from cloche_server.channel import Budget
from cloche_server.node.approving import Approving, open_approvals
from cloche_server.node.clock import SystemClock
from cloche_server.node.context import Context
from cloche_server.node.journal import Journal
from cloche_server.node.keeping import Agenda
from cloche_server.node.secreting import Secreting, open_secrets
from cloche_server.node.store import Store
from tests.unit.api.memory import MemoryBackend
from tests.unit.api.served import Served


class Rooms(Secreting, Approving, MemoryBackend):
    """Secrets and approvals are real; the rest is the memory backend's."""

    def __init__(self, base: Path, webhook: tuple[str, bytes] | None = None, scope_s_max: float | None = None) -> None:
        super().__init__()
        clock = SystemClock()
        self.state = base / "state"
        store = Store(self.state)
        self.journal = Journal(store.journal_dir, clock)
        context = Context(clock, self.journal, store, Agenda(clock), Budget(1))
        self.secrets = open_secrets(context, self.state, base / "config")
        self.approvals = open_approvals(context, scope_s_max=lambda: scope_s_max, webhook=lambda: webhook)


class ServedRooms(Served):
    backend: Rooms  # type: ignore[assignment]

    def __init__(self, base: Path, tcp: TcpConfig | None = None, **fields: Any) -> None:
        super().__init__(base, tcp)
        self.backend = Rooms(base, **fields)

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """In the server's own loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)


@contextlib.contextmanager
def rooms(base: Path, tcp: TcpConfig | None = None, **fields: Any) -> Iterator[ServedRooms]:
    one = ServedRooms(base, tcp, **fields).start()
    try:
        yield one
    finally:
        one.stop()
