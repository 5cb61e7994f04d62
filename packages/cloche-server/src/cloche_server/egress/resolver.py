"""Names to addresses, asked by the host at each connection: the guest's queries never leave its own machine.

Without nameservers in the organisation's file the system is asked, in a bounded number of threads. With them, a query is made
here and sent by `sockets`: UDP, then TCP when the answer was cut short. Answers are hostile: bounded, parsed strictly, and
checked by whoever dials.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype

from cloche_server.egress import sockets
from cloche_server.egress.services import Unresolved
from cloche_server.policy.model import Address

ADDRESSES_MAX: Final = 16
TIMEOUT_S: Final = 5.0
THREADS: Final = 16
WAITING_MAX: Final = 256
ANSWER_BYTES_MAX: Final = 65_535

Nameservers = tuple[tuple[str, int], ...] | None


class _NoAnswer(Exception):
    """What came is no answer to the question."""


class HostResolver:
    """Asks the organisation's nameservers, or the system where it names none."""

    def __init__(self, nameservers: Callable[[], Nameservers] = lambda: None) -> None:
        self._nameservers = nameservers
        self._threads: ThreadPoolExecutor | None = None
        self._waiting = 0

    async def addresses(self, name: str) -> tuple[Address, ...]:
        servers = self._nameservers()
        if self._waiting >= WAITING_MAX:
            raise Unresolved("too many names are being looked up at once")
        self._waiting += 1
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await (self._ask_system(name) if servers is None else _ask_all(servers, name))
        except TimeoutError:
            raise Unresolved("the name servers did not answer in time") from None
        finally:
            self._waiting -= 1
        if not found:
            raise Unresolved("the name has no address")
        if len(found) > ADDRESSES_MAX:
            found = found[:ADDRESSES_MAX]
        return found

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _ask_system(self, name: str) -> tuple[Address, ...]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="resolve")
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, _system, name)
        except (OSError, UnicodeError):
            raise Unresolved("the name has no address") from None


def _system(name: str) -> tuple[Address, ...]:
    answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    texts = dict.fromkeys(str(answer[4][0]).partition("%")[0] for answer in answers)
    return tuple(ipaddress.ip_address(text) for text in texts)


async def _ask_all(servers: Sequence[tuple[str, int]], name: str) -> tuple[Address, ...]:
    """Both families of the first server that gives an answer, IPv4 first."""
    why = Unresolved("no name server is configured")
    each_s = TIMEOUT_S / max(1, len(servers))
    for host, port in servers:
        server = ipaddress.ip_address(host)
        try:
            async with asyncio.timeout(each_s):
                answers = await asyncio.gather(
                    *(_ask(server, port, name, kind) for kind in (dns.rdatatype.A, dns.rdatatype.AAAA)),
                    return_exceptions=True,  # so that neither goes on alone
                )
            return tuple(each for answer in answers for each in _or_raise(answer))
        except TimeoutError:
            why = Unresolved("the name servers did not answer in time")
        except (OSError, _NoAnswer, dns.exception.DNSException):
            why = Unresolved("the name servers gave no proper answer")
    raise why


def _or_raise(answer: tuple[Address, ...] | BaseException) -> tuple[Address, ...]:
    if isinstance(answer, BaseException):
        raise answer
    return answer


async def _ask(server: Address, port: int, name: str, kind: dns.rdatatype.RdataType) -> tuple[Address, ...]:
    query = dns.message.make_query(
        dns.name.from_text(name), kind, id=secrets.randbelow(65_536), use_edns=0, payload=1232
    )
    wire = query.to_wire()
    answer = await _over_udp(server, port, query, wire)
    if answer.flags & dns.flags.TC:
        answer = await _over_tcp(server, port, query, wire)
    if answer.rcode() not in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
        raise _NoAnswer(f"rcode {answer.rcode()}")
    rrset = answer.resolve_chaining().answer
    return () if rrset is None else tuple(ipaddress.ip_address(each.address) for each in rrset)


async def _over_udp(server: Address, port: int, query: dns.message.Message, wire: bytes) -> dns.message.QueryMessage:
    loop = asyncio.get_running_loop()
    with sockets.udp_to(server, port) as sock:
        await loop.sock_sendall(sock, wire)
        while True:
            data = await loop.sock_recv(sock, ANSWER_BYTES_MAX)
            answer = _parsed(data)
            if answer is not None and query.is_response(answer):
                return answer  # anything else was not for us: go on waiting


async def _over_tcp(server: Address, port: int, query: dns.message.Message, wire: bytes) -> dns.message.QueryMessage:
    loop = asyncio.get_running_loop()
    with await sockets.tcp_to(server, port, TIMEOUT_S) as sock:
        await loop.sock_sendall(sock, len(wire).to_bytes(2, "big") + wire)
        size = int.from_bytes(await _exactly(sock, 2), "big")
        answer = _parsed(await _exactly(sock, size))
    if answer is None or not query.is_response(answer):
        raise _NoAnswer("not an answer to the question")
    return answer


async def _exactly(sock: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise _NoAnswer("the name server closed")
        data += piece
    return data


def _parsed(data: bytes) -> dns.message.QueryMessage | None:
    try:
        answer = dns.message.from_wire(data, ignore_trailing=False)
    except dns.exception.DNSException:
        return None
    return answer if isinstance(answer, dns.message.QueryMessage) else None
