"""The only file that opens a socket to the world: to an address that was checked, never to a name."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence

from cloche_server.policy.model import Address

DIAL_ONE_S = 5.0
DIAL_ALL_S = 15.0


class DialFailed(Exception):
    """No address answered. The message is for a person."""


async def dial(addresses: Sequence[Address], port: int) -> tuple[socket.socket, Address]:
    """A connected, non-blocking socket to the first address that answers, in the order given."""
    why = "it has no address"
    loop = asyncio.get_running_loop()
    ends = loop.time() + DIAL_ALL_S
    for address in addresses:
        left_s = min(DIAL_ONE_S, ends - loop.time())
        if left_s <= 0:
            break
        try:
            return await _connect(address, port, left_s), address
        except TimeoutError:
            why = f"{address} did not answer"
        except OSError as bad:
            why = f"{address}: {os.strerror(bad.errno or 0)}"
    raise DialFailed(why)


async def _connect(address: Address, port: int, timeout_s: float) -> socket.socket:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            sock.connect((str(address), port))
        except BlockingIOError:
            async with asyncio.timeout(timeout_s):
                await _writable(sock)
            failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed)) from None
        return sock
    except BaseException:
        sock.close()
        raise


async def _writable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(sock.fileno(), _settle, ready)
    try:
        await ready
    finally:
        loop.remove_writer(sock.fileno())


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def udp_to(address: Address, port: int) -> socket.socket:
    """To ask a name server that the organisation's file names."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.connect((str(address), port))
    except BaseException:
        sock.close()
        raise
    return sock


async def tcp_to(address: Address, port: int, timeout_s: float) -> socket.socket:
    return await _connect(address, port, timeout_s)
