"""What every sandbox of a node shares: the clock, the journal, the store, the agenda, the budget of windows."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cloche.wire.errors import ClocheError, error
from cloche_server.channel import Budget, ChannelFull, ChannelLost, OperationFailed, ProtocolError
from cloche_server.logs import Log
from cloche_server.node.clock import Clock
from cloche_server.node.guest_text import escaped
from cloche_server.node.journal import Journal
from cloche_server.node.keeping import Agenda
from cloche_server.node.spares import Spares
from cloche_server.node.store import Store

if TYPE_CHECKING:
    from cloche_server.node.ways import Ways


@dataclass
class Context:
    """Passed to sandboxes and commands; owned by the node."""

    clock: Clock
    journal: Journal
    store: Store
    agenda: Agenda
    budget: Budget
    ways: Ways = field(init=False)
    """Set right after it is made, before there is any sandbox."""
    log: Log = field(default_factory=Log)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    spares: Spares = field(init=False)

    def __post_init__(self) -> None:
        self.spares = Spares(self.store.root / "spares", self.agenda.after)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str, *, quiet: bool = False) -> asyncio.Task[Any]:
        """A task that is kept until it is done. Its failure is told, unless (`quiet`) whoever waits for it tells it."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard if quiet else self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (bad := task.exception()) is not None:
            self.log.error("task failed", task=task.get_name(), exc_info=bad)


def from_guest(failure: OperationFailed, codes: dict[str, str], *, doing: str) -> ClocheError:
    """A guest's refusal as an error of the table; its text is the guest's and is shown escaped."""
    code = codes.get(failure.code, "guest_io")
    return error(code, f"{doing}: {escaped(failure.message)}", detail={"guest_code": failure.code})


def from_channel(failure: ChannelLost | ChannelFull | ProtocolError) -> ClocheError:
    """A call that the channel cut short."""
    if isinstance(failure, ChannelFull):
        return error("overloaded", "The sandbox has as many open streams as it can have.", retry_after_s=1.0)
    if isinstance(failure, ProtocolError) or failure.reason.startswith("protocol_error"):
        return error("protocol_error", "The guest broke the channel's contract.")
    return error("sandbox_ended", "The sandbox ended during the call.")
