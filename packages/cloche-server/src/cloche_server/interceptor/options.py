"""The options that mitmproxy's layers read. They are plain attributes: its own option manager checks and copies each read.

An option that is missing here ends the connection that asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """One set for all connections."""

    tcp_timeout: int = 3600
    """Seconds without a byte either way."""
    rawtcp: bool = False
    """An upgrade to anything but WebSocket must not become an unseen tunnel."""
    websocket: bool = True
    validate_inbound_headers: bool = True
    normalize_outbound_headers: bool = True
    keep_host_header: bool = True
    connection_strategy: str = "eager"
    http2_ping_keepalive: int = 58
    store_streamed_bodies: bool = False
    stream_large_bodies: str | None = None
    body_size_limit: str | None = None
    http_connect_send_host_header: bool = True
    proxy_debug: bool = False
