"""Connections to the keeper: who may speak at all, whole messages in, answers with descriptors out."""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from typing import Final

from cloche_server.keeper import kernel
from cloche_server.keeper.loop import Loop
from cloche_server.keeper.verbs import DESCRIPTORS_MAX, MESSAGE_BYTES_MAX, Refusal, Request, parse, refusal

CONNECTIONS_MAX: Final = 16
ANSWERS_MAX: Final = 1024
"""Answers that wait for a peer that does not read; then it is dropped."""


class Peer:
    """One connection."""

    def __init__(self, connection: socket.socket, pid: int, pidfd: int) -> None:
        self.connection = connection
        self.pid = pid
        self.pidfd = pidfd
        self.greeted = False
        self.waiting: deque[tuple[bytes, list[int]]] = deque()

    def is_alive(self) -> bool:
        """Whether the process at the other end lives, connected or not."""
        return not is_readable(self.pidfd)


class Peers:
    """All connections. `answer_to` handles a request; it raises Refusal, and owns no descriptor that it is given."""

    def __init__(
        self, loop: Loop, listener: socket.socket, answer_to: Callable[[Peer, Request, list[int]], None]
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._answer_to = answer_to
        self._peers: set[Peer] = set()
        self._holder: Peer | None = None
        loop.watch(listener.fileno(), self._accept)

    def hold(self, peer: Peer) -> None:
        """This peer's process is the daemon now. Refusal while another one lives."""
        holder = self._holder
        if holder is not None and holder is not peer:
            if holder.pid != peer.pid and holder.is_alive():
                raise Refusal("busy", f"process {holder.pid} holds this keeper")
            self._holder = None
            if holder in self._peers:
                self._drop(holder)
            else:
                os.close(holder.pidfd)
        self._holder = peer

    def send(self, peer: Peer, data: bytes, fds: tuple[int, ...] = ()) -> None:
        """Never blocks. `fds` are copied if they must wait; the caller keeps its own."""
        if peer not in self._peers:
            return
        if not peer.waiting and self._send_now(peer, data, list(fds)):
            return
        if len(peer.waiting) >= ANSWERS_MAX:
            log(f"peer {peer.pid} does not read its answers")
            self._drop(peer)
            return
        if not peer.waiting:
            self._loop.unwatch(peer.connection.fileno())
            self._loop.watch(peer.connection.fileno(), lambda: self._writable(peer), write=True)
        peer.waiting.append((data, [os.dup(fd) for fd in fds]))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # the peer went away, or descriptors are short: the next one tries again
            log(f"accept: {error}")
            return
        connection.setblocking(False)
        pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != 0 or len(self._peers) >= CONNECTIONS_MAX:
            connection.close()
            return
        try:
            pidfd = kernel.peer_pidfd(connection, pid)
        except OSError:  # it has gone already
            connection.close()
            return
        peer = Peer(connection, pid, pidfd)
        self._peers.add(peer)
        self._loop.watch(connection.fileno(), lambda: self._readable(peer))

    def _drop(self, peer: Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        self._loop.unwatch(peer.connection.fileno())
        for _, fds in peer.waiting:
            close_all(fds)
        peer.waiting.clear()
        peer.connection.close()
        if peer is not self._holder:  # the holder's pidfd still says whether the daemon lives
            os.close(peer.pidfd)

    def _readable(self, peer: Peer) -> None:
        try:
            data, ancillary, flags, _ = peer.connection.recvmsg(
                MESSAGE_BYTES_MAX + 1, socket.CMSG_SPACE(4 * DESCRIPTORS_MAX), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            self._drop(peer)
            return
        fds = descriptors(ancillary)
        try:
            if not data:
                self._drop(peer)
                return
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise Refusal("too_large", "the message or its descriptors were cut off")
            self._answer_to(peer, parse(data, len(fds)), fds)
        except Refusal as error:
            self.send(peer, refusal(error))
        finally:
            close_all(fds)

    def _send_now(self, peer: Peer, data: bytes, fds: list[int]) -> bool:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            peer.connection.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            self._drop(peer)
        return True

    def _writable(self, peer: Peer) -> None:
        while peer.waiting:
            data, fds = peer.waiting[0]
            if not self._send_now(peer, data, fds):
                return
            if peer not in self._peers:
                return
            peer.waiting.popleft()
            close_all(fds)
        self._loop.unwatch(peer.connection.fileno())
        self._loop.watch(peer.connection.fileno(), lambda: self._readable(peer))


def is_readable(fd: int) -> bool:
    """Of a pidfd: whether its process is dead."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def log(message: str) -> None:
    sys.stderr.write(f"keeper: {message}\n")
    sys.stderr.flush()
