"""Whether a guest still answers: a channel that was silent for long is asked for a sign of life."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cloche_server.channel import Channel, ChannelError
from cloche_server.node.context import Context
from cloche_server.node.keeping import Entry

SILENCE_S: Final = 60.0
PONG_S: Final = 10.0
PONGS_MISSED_MAX: Final = 2


class Liveness:
    """Of one channel, from `begin` to `stop`; `dead` is told once, with the reason."""

    def __init__(self, context: Context, channel: Channel, name: str, dead: Callable[[str], None]) -> None:
        self._context = context
        self._channel = channel
        self._name = name
        self._dead = dead
        self._bytes_seen = -1
        self._entry: Entry | None = None
        self._stopped = False

    def begin(self) -> None:
        self._entry = self._context.agenda.after(SILENCE_S, self._check)

    def stop(self) -> None:
        self._stopped = True
        if self._entry is not None:
            self._entry.cancel()

    def _check(self) -> None:
        seen = self._channel.stats.bytes_in
        if seen != self._bytes_seen:
            self._bytes_seen = seen
            self.begin()
        else:
            self._context.spawn(self._ping(), f"ping {self._name}")

    async def _ping(self) -> None:
        for _ in range(PONGS_MISSED_MAX):
            try:
                await self._channel.ping(PONG_S)
            except TimeoutError:
                continue
            except ChannelError:
                return  # its owner has been told, with the reason
            self._bytes_seen = self._channel.stats.bytes_in
            if not self._stopped:
                self.begin()
            return
        if not self._stopped:
            self._dead(f"no answer to {PONGS_MISSED_MAX} pings of {PONG_S:g} s")
