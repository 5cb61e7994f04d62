"""Where nothing should ever arrive: listens on a loopback address and keeps every byte and every connection that comes."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

PORTS = (22, 25, 80, 443, 853, 2375, 5432, 8080, 8443)
UDP_PORTS = (53, 123, 443, 3478)


@dataclass
class Recorder:
    """`connections` are (port, what came), `datagrams` likewise."""

    address: str
    connections: list[tuple[int, bytearray]] = field(default_factory=list)
    datagrams: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def is_untouched(self) -> bool:
        return not self.connections and not self.datagrams

    def __str__(self) -> str:
        return f"{self.address}: {[(p, bytes(b[:80])) for p, b in self.connections]} {self.datagrams}"


@contextmanager
def recorder(address: str, ports: Sequence[int] = PORTS, udp_ports: Sequence[int] = UDP_PORTS) -> Iterator[Recorder]:
    made = Recorder(address)
    chosen = selectors.DefaultSelector()
    for port in ports:
        listener = socket.create_server((address, port), backlog=1024)
        listener.setblocking(False)
        chosen.register(listener, selectors.EVENT_READ, ("accept", port))
    for port in udp_ports:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((address, port))
        sock.setblocking(False)
        chosen.register(sock, selectors.EVENT_READ, ("datagram", port))
    stop, stopped = socket.socketpair()
    chosen.register(stopped, selectors.EVENT_READ, ("stop", 0))
    thread = threading.Thread(target=_record, args=(made, chosen), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        stop.close()
        thread.join(5)
        for key in list(chosen.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        chosen.close()


def _record(made: Recorder, chosen: selectors.BaseSelector) -> None:
    while True:
        for key, _ in chosen.select():
            what, about = key.data
            sock: socket.socket = key.fileobj  # type: ignore[assignment]
            if what == "stop":
                return
            if what == "accept":
                connection, _ = sock.accept()
                connection.setblocking(False)
                made.connections.append((about, bytearray()))
                chosen.register(connection, selectors.EVENT_READ, ("bytes", made.connections[-1][1]))
            elif what == "datagram":
                made.datagrams.append((about, sock.recv(65536)))
            else:
                _take(sock, about, chosen)


def _take(sock: socket.socket, kept: bytearray, chosen: selectors.BaseSelector) -> None:
    try:
        data = sock.recv(65536)
    except OSError:
        data = b""
    if data:
        kept += data
    else:
        chosen.unregister(sock)
        sock.close()
