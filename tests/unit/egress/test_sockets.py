"""Dialling: to checked addresses only, the next one when one fails, never longer than its time."""

import asyncio
import os
import socket
from ipaddress import ip_address

import pytest
import uvloop

from cloche_server.egress import sockets

HERE = ip_address("127.0.0.1")
NOBODY = ip_address("127.0.0.9")
RUNS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])


@RUNS
def test_the_next_address_when_one_refuses(run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        async def dial() -> tuple[socket.socket, object]:
            return await sockets.dial([NOBODY, ip_address("::1"), HERE], server.getsockname()[1])

        sock, address = run(dial())
        assert address == HERE
        assert sock.getpeername() == server.getsockname()
        assert not sock.getblocking()
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert not os.get_inheritable(sock.fileno())
        sock.close()


@RUNS
def test_all_refuse(run) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(sockets.DialFailed, match="Connection refused"):
        run(sockets.dial([HERE, NOBODY], 1))
    with pytest.raises(sockets.DialFailed, match="no address"):
        run(sockets.dial([], 1))
    assert len(os.listdir("/proc/self/fd")) == before


@RUNS
def test_an_address_that_does_not_answer_costs_its_time_and_no_more(run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full lets connections hang."""
    monkeypatch.setattr(sockets, "DIAL_ONE_S", 0.2)
    monkeypatch.setattr(sockets, "DIAL_ALL_S", 0.5)
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    port = full.getsockname()[1]
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(("127.0.0.1", port))
        fillers.append(filler)
    before = len(os.listdir("/proc/self/fd"))

    async def dial() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(sockets.DialFailed, match="did not answer"):
            await sockets.dial([HERE] * 10, port)
        return loop.time() - began

    assert 0.4 < run(dial()) < 2
    assert len(os.listdir("/proc/self/fd")) == before
    for each in (full, *fillers):
        each.close()


@RUNS
def test_a_dial_that_is_cancelled_leaves_no_socket(run) -> None:
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:
        filler.setblocking(False)
        filler.connect_ex(full.getsockname())
    before = len(os.listdir("/proc/self/fd"))

    async def give_up() -> None:
        task = asyncio.create_task(sockets.dial([HERE], full.getsockname()[1]))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])

    run(give_up())
    assert len(os.listdir("/proc/self/fd")) == before
    for each in (full, *fillers):
        each.close()
