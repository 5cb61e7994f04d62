"""Single flight: the same work asked for many times at once is done once, and everybody hears how it ended.

A failure is told to all who wait and not kept. Who stops waiting does not stop the others; when nobody waits any more, the
work is cancelled, and the next one of that key begins only when its cleaning up has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from cloche.wire.errors import error

ResultT = TypeVar("ResultT")
SaidT = TypeVar("SaidT")


class Flight(Generic[SaidT, ResultT]):
    """One piece of work that is going on."""

    def __init__(self) -> None:
        self.task: asyncio.Task[ResultT] | None = None
        self.waiting = 0
        self.listeners: list[Callable[[SaidT], None]] = []
        self.first: SaidT | None = None
        """Said again to those who come later."""

    @property
    def is_over(self) -> bool:
        return self.task is not None and self.task.done()

    def say(self, what: SaidT) -> None:
        """To everybody who waits. A listener must not raise: it has no part in the work."""
        if self.first is None:
            self.first = what
        for listener in list(self.listeners):
            listener(what)


class Flights(Generic[SaidT, ResultT]):
    """Work by key."""

    def __init__(self) -> None:
        self._going_on: dict[Hashable, Flight[SaidT, ResultT]] = {}
        self._ending: dict[Hashable, asyncio.Task[ResultT]] = {}

    def keys(self) -> list[Hashable]:
        return [*self._going_on, *self._ending]

    async def join(
        self,
        key: Hashable,
        work: Callable[[Callable[[SaidT], None]], Awaitable[ResultT]],
        listener: Callable[[SaidT], None] | None = None,
    ) -> ResultT:
        """The result of `work`, which gets a function to say how it goes on; or of the same work, already going on."""
        flight = self._going_on.get(key)
        if flight is None or flight.is_over:
            flight = self._start(key, work)
        elif listener is not None and flight.first is not None:
            listener(flight.first)
        assert flight.task is not None, "set when it was made"
        if listener is not None:
            flight.listeners.append(listener)
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is not None and not me.cancelling():  # the work was ended from outside, not this waiter
                raise error("node_unavailable", "The node is stopping.") from None
            raise
        finally:
            flight.waiting -= 1
            if listener is not None:
                flight.listeners.remove(listener)
            if not flight.waiting and not flight.task.done():
                await self._abandon(key, flight)

    async def close(self) -> None:
        """Ends all work; who waits hears of it."""
        tasks = [flight.task for flight in self._going_on.values() if flight.task is not None]
        tasks += self._ending.values()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(
        self, key: Hashable, work: Callable[[Callable[[SaidT], None]], Awaitable[ResultT]]
    ) -> Flight[SaidT, ResultT]:
        flight: Flight[SaidT, ResultT] = Flight()
        before = self._ending.get(key)

        async def run() -> ResultT:
            if before is not None:
                await asyncio.wait([before])
            return await work(flight.say)

        def forget(task: asyncio.Task[ResultT]) -> None:
            if self._going_on.get(key) is flight:
                del self._going_on[key]
            if self._ending.get(key) is task:
                del self._ending[key]

        flight.task = asyncio.create_task(run())
        flight.task.add_done_callback(forget)
        self._going_on[key] = flight
        return flight

    async def _abandon(self, key: Hashable, flight: Flight[SaidT, ResultT]) -> None:
        assert flight.task is not None, "it was waited for"
        del self._going_on[key]
        self._ending[key] = flight.task
        flight.task.cancel()
        await asyncio.wait([flight.task])


async def finished(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """For a step that must not be left half done: who is cancelled meanwhile goes only after its end."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
