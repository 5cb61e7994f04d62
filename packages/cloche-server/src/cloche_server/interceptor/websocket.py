"""WebSocket on mitmproxy's layer, with a limit on a message and a look at control frames."""
# mypy: disable-error-code="import-not-found"
# mypy: disallow-subclassing-any=False

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import wsproto.connection
import wsproto.events
from mitmproxy.proxy import commands
from mitmproxy.proxy.layers import websocket as stock

from .judge import exchange_of
from .places import Misplaced

MESSAGE_BYTES_MAX: Final = 16 << 20
FRAGMENTS_MAX: Final = 4096


class BoundedWebsocket(stock.WebsocketLayer):
    """Ends the connection when a message is too long, or a control frame holds what it may not hold."""

    def start(self, event: Any) -> Iterator[Any]:
        yield from super().start(event)
        for side in (self.client_ws, self.server_ws):
            side.events = self._watched(side, side.events)

    _handle_event: Any = start

    def relay_messages(self, event: Any) -> Iterator[Any]:
        try:
            yield from super().relay_messages(event)
        except Misplaced as found:
            exchange_of(self.flow).judge.misplaced(self.flow, found)
        if exchange_of(self.flow).refusal is not None:
            yield from self._close()
            return
        for side in (self.client_ws, self.server_ws):
            if len(side.frame_buf) > FRAGMENTS_MAX or sum(map(len, side.frame_buf)) > MESSAGE_BYTES_MAX:
                side.frame_buf = [b""]
                yield from self._close()
                return

    def _close(self) -> Iterator[Any]:
        self._handle_event = self.done
        self.flow.live = False
        for side in (self.client_ws, self.server_ws):
            if side.state is wsproto.connection.ConnectionState.OPEN:
                yield side.send2(wsproto.events.CloseConnection(code=1008, reason="refused by Cloche"))
            yield commands.CloseConnection(side.conn)

    def _watched(self, side: Any, found: Any) -> Any:
        judge = exchange_of(self.flow).judge
        from_client = side is self.client_ws

        def watched() -> Iterator[Any]:
            for event in found():
                if isinstance(event, wsproto.events.Ping | wsproto.events.Pong):
                    payload = judge.control_payload(bytes(event.payload), from_client=from_client)
                    yield dataclasses.replace(event, payload=payload[:125])
                elif isinstance(event, wsproto.events.CloseConnection) and event.reason:
                    reason = judge.control_payload(event.reason.encode(), from_client=from_client)
                    yield dataclasses.replace(event, reason=reason[:120].decode("utf-8", "ignore"))
                else:
                    yield event

        return watched


def install() -> None:
    """Puts it in the place of mitmproxy's, which is looked up by name. Called once."""
    stock.WebsocketLayer = BoundedWebsocket
