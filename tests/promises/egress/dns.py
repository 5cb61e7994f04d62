"""A real DNS server whose answers a test changes while it runs, and which remembers every question."""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

Answers = Sequence[str] | Callable[[int], Sequence[str]]
"""Addresses, or what gives them for the n-th question of that name (from 0)."""


class DnsServer:
    """`answers[name]` are its addresses, `aliases[name]` its CNAME; a name that is in neither does not exist."""

    def __init__(self) -> None:
        self.answers: dict[str, Answers] = {}
        self.aliases: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []
        """Name and type of each question, in order."""
        self._count: dict[str, int] = {}
        self._lock = threading.Lock()

    def reply(self, wire: bytes) -> bytes:
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True).lower()
        kind = dns.rdatatype.to_text(question.rdtype)
        with self._lock:
            self.asked.append((name, kind))
            response = dns.message.make_response(query)
            response.flags |= dns.flags.RA
            self._fill(response, name, kind)
        return response.to_wire()

    def _fill(self, response: dns.message.Message, name: str, kind: str) -> None:
        shown = name
        while shown in self.aliases:
            target = self.aliases[shown]
            response.answer.append(dns.rrset.from_text(f"{shown}.", 1, "IN", "CNAME", f"{target}."))
            shown = target
        found = self.answers.get(shown)
        if found is None:
            response.set_rcode(dns.rcode.NXDOMAIN)
            return
        if callable(found):
            number = self._count.get(f"{shown}/{kind}", 0)
            self._count[f"{shown}/{kind}"] = number + 1
            found = found(number)
        wanted = [each for each in found if kind == ("AAAA" if ":" in each else "A")]
        if wanted:
            response.answer.append(dns.rrset.from_text(f"{shown}.", 1, "IN", kind, *wanted))

    def queries(self, name: str) -> int:
        return sum(1 for asked, _ in self.asked if asked == name)


class _Udp(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        data, sock = self.request
        sock.sendto(self.server.owner.reply(data), self.client_address)  # type: ignore[attr-defined]


class _Tcp(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        (size,) = struct.unpack("!H", self.request.recv(2, socket.MSG_WAITALL))
        answer = self.server.owner.reply(self.request.recv(size, socket.MSG_WAITALL))  # type: ignore[attr-defined]
        self.request.sendall(struct.pack("!H", len(answer)) + answer)


@contextmanager
def dns_server(address: str) -> Iterator[DnsServer]:
    """On UDP and TCP 53 of a loopback address."""
    made = DnsServer()
    servers = (
        socketserver.ThreadingUDPServer((address, 53), _Udp),
        socketserver.ThreadingTCPServer((address, 53), _Tcp),
    )
    for server in servers:
        server.daemon_threads = True
        server.owner = made  # type: ignore[union-attr]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield made
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
