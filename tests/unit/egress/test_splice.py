"""Bytes between two sockets, on both loops: whole, bounded, closed together."""

import asyncio
import hashlib
import socket
import threading

import pytest
import uvloop

from cloche_server.egress.splice import Splice
from tests.unit.channel.fake_guest import pattern, pattern_sha256

RUNS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
COUNT = 16 << 20


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


@RUNS
def test_both_ways_whole_with_half_close(run) -> None:
    far, near = tcp_pair()
    ours, theirs = socket.socketpair()
    got: dict[str, str] = {}

    def talk(sock: socket.socket, name: str) -> None:
        def send() -> None:
            sock.sendall(pattern(0, COUNT))
            sock.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        digest = hashlib.sha256()
        while data := sock.recv(1 << 16):
            digest.update(data)
        got[name] = digest.hexdigest()
        sender.join()

    threads = [threading.Thread(target=talk, args=each) for each in ((far, "far"), (theirs, "theirs"))]

    async def main() -> None:
        over = asyncio.Event()
        Splice(ours, near, lambda splice: over.set())
        for thread in threads:
            thread.start()
        async with asyncio.timeout(30):
            await over.wait()

    run(main())
    for thread in threads:
        thread.join(10)
    assert got == {"far": pattern_sha256(COUNT), "theirs": pattern_sha256(COUNT)}
    assert near.fileno() == ours.fileno() == -1
    far.close()
    theirs.close()


@RUNS
def test_a_reset_with_last_words_ends_both(run) -> None:
    far, near = tcp_pair()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    async def main() -> None:
        over = asyncio.Event()
        far.sendall(b"last words")
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        far.close()
        Splice(ours, near, lambda splice: over.set())
        async with asyncio.timeout(5):
            await over.wait()

    run(main())
    assert near.fileno() == ours.fileno() == -1
    theirs.close()


@RUNS
def test_close_is_once_and_whoever_waits_is_told(run) -> None:
    far, near = tcp_pair()
    ours, theirs = socket.socketpair()
    told: list[int] = []

    async def main() -> None:
        splice = Splice(ours, near, lambda splice: told.append(1))
        theirs.setblocking(False)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for _ in range(200):
            try:
                theirs.send(bytes(65_536))
            except BlockingIOError:
                await asyncio.sleep(0.001)
        splice.close(abruptly=True)
        splice.close()

    run(main())
    assert told == [1]
    with pytest.raises(ConnectionResetError):
        read_to_end(far)
    far.close()
    theirs.close()


def read_to_end(sock: socket.socket) -> None:
    while sock.recv(1 << 20):
        pass
