"""The host's resolver against a real name server on loopback."""

import asyncio
import socket
import struct
import threading

import dns.message
import dns.rrset
import pytest

from cloche_server.egress.resolver import HostResolver
from cloche_server.egress.services import Unresolved
from tests.unit.egress.world import nameserver

pytestmark = pytest.mark.req("NET-4")


def asking(*servers: tuple[str, int]) -> HostResolver:
    return HostResolver(lambda: servers)


async def test_both_families_in_order() -> None:
    with nameserver({"a.example": ["203.0.113.7", "2001:db8::7"]}) as (server, _):
        found = await asking(server).addresses("a.example")
    assert [str(each) for each in found] == ["203.0.113.7", "2001:db8::7"]


async def test_at_most_sixteen() -> None:
    with nameserver({"a.example": [f"203.0.113.{n}" for n in range(1, 60)]}) as (server, _):
        assert len(await asking(server).addresses("a.example")) == 16


async def test_no_such_name_and_no_server() -> None:
    with nameserver({}) as (server, _):
        with pytest.raises(Unresolved, match="no address"):
            await asking(server).addresses("a.example")
    closed = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    closed.bind(("127.0.0.1", 0))
    address = closed.getsockname()
    closed.close()
    with pytest.raises(Unresolved):
        await asking(address).addresses("a.example")


async def test_the_second_server_is_asked_when_the_first_fails() -> None:
    gone = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    gone.bind(("127.0.0.1", 0))
    address = gone.getsockname()
    gone.close()
    with nameserver({"a.example": ["203.0.113.7"]}) as (server, _):
        assert len(await asking(address, server).addresses("a.example")) == 1


async def test_a_forged_answer_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong id, wrong question, garbage: the resolver waits for the right one, and not for ever."""
    monkeypatch.setattr("cloche_server.egress.resolver.TIMEOUT_S", 0.3)
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))

    def serve() -> None:
        for _ in range(2):
            data, peer = sock.recvfrom(4096)
            query = dns.message.from_wire(data)
            forged = dns.message.make_response(query)
            forged.id ^= 1
            forged.answer.append(dns.rrset.from_text(query.question[0].name, 1, "IN", "A", "203.0.113.66"))
            other = dns.message.make_response(dns.message.make_query("other.example", "A", id=query.id))
            for wire in (b"", b"\0" * 11, data[:5], forged.to_wire(), other.to_wire()):
                sock.sendto(wire, peer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(Unresolved, match="in time"):
        await asking(sock.getsockname()).addresses("a.example")
    thread.join(5)
    sock.close()


async def test_a_long_answer_comes_over_tcp() -> None:
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    tcp = socket.create_server(udp.getsockname())

    def serve_udp() -> None:
        for _ in range(2):
            data, peer = udp.recvfrom(4096)
            response = dns.message.make_response(dns.message.from_wire(data))
            response.flags |= 0x0200
            udp.sendto(response.to_wire(), peer)

    def serve_tcp() -> None:
        for _ in range(2):
            sock, _ = tcp.accept()
            with sock:
                size = struct.unpack(">H", sock.recv(2))[0]
                query = dns.message.from_wire(sock.recv(size))
                response = dns.message.make_response(query)
                if query.question[0].rdtype == 1:
                    response.answer.append(dns.rrset.from_text(query.question[0].name, 1, "IN", "A", "203.0.113.9"))
                wire = response.to_wire()
                sock.sendall(struct.pack(">H", len(wire)) + wire[:3])
                sock.sendall(wire[3:])

    for each in (serve_udp, serve_tcp):
        threading.Thread(target=each, daemon=True).start()
    found = await asking(udp.getsockname()).addresses("a.example")
    assert [str(each) for each in found] == ["203.0.113.9"]
    udp.close()
    tcp.close()


async def test_the_system_is_asked_without_nameservers() -> None:
    resolver = HostResolver()
    assert "127.0.0.1" in [str(each) for each in await resolver.addresses("localhost")]
    with pytest.raises(Unresolved):
        await resolver.addresses("no-such-name.invalid")
    resolver.close()


async def test_questions_in_flight_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloche_server.egress.resolver.WAITING_MAX", 2)
    monkeypatch.setattr("cloche_server.egress.resolver.TIMEOUT_S", 0.5)
    silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    silent.bind(("127.0.0.1", 0))
    resolver = asking(silent.getsockname())
    first = [asyncio.create_task(resolver.addresses("a.example")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Unresolved, match="too many"):
        await resolver.addresses("b.example")
    for task in first:
        with pytest.raises(Unresolved, match="in time"):
            await task
    silent.close()
