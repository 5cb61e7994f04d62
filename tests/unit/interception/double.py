"""Stands in for the interceptor where its process is what is tested: speaks the control protocol, and lies when it is told to.

What it does with a connection is the host's first label: `echo`, `tell` (what it knows), `through` (asks, dials, relays), a name of
`LIES`, … It also tells what it sees of the world (`world`). Standard library.
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

CONTROL = socket.socket(fileno=0)


def say(message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    body = json.dumps(message).encode()
    data = len(body).to_bytes(4, "little") + body
    sent = socket.send_fds(CONTROL, [data], list(fds)) if fds else 0
    CONTROL.sendall(data[sent:])


def tried(what: Callable[[], Any]) -> Any:
    try:
        return what()
    except OSError as error:
        return error.strerror


def dialled(family: int, kind: int, address: Any) -> Any:
    with socket.socket(family, kind) as one:
        one.settimeout(3)
        return one.connect(address)


def world() -> dict[str, Any]:
    """What a process that somebody took over could do."""
    return {
        "ids": os.getresuid() + os.getresgid(),
        "groups": os.getgroups(),
        "pid": os.getpid(),
        "links": [name for _, name in socket.if_nameindex()],
        "loopback": tried(lambda: dialled(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 22))),
        "dial": tried(lambda: dialled(socket.AF_INET, socket.SOCK_STREAM, ("192.0.2.1", 443))),
        "dial6": tried(lambda: dialled(socket.AF_INET6, socket.SOCK_STREAM, ("2001:db8::1", 443))),
        "raw": tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()),
        "packet": tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()),
        "write": [tried(lambda path=path: open(f"{path}/cloche-was-here", "w").close()) for path in ("/tmp", "/var/tmp", "/dev/shm", "/")],
        "setuid": tried(lambda: os.setresuid(0, 0, 0)),
        "memory": tried(lambda: open("/proc/self/mem", "rb").close()),
        "env": sorted(os.environ),
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
    }  # fmt: skip


def asks(conn: int) -> None:
    for number in range(600):
        say({"t": "request", "ask": 1000 + number, "conn": conn, "method": "GET", "path": "/wait"})


def twice(conn: int) -> None:
    for _ in range(2):
        say({"t": "request", "ask": 900, "conn": conn, "method": "GET", "path": "/"})


def flood(conn: int) -> None:
    for _ in range(5000):
        say({"t": "denied", "conn": conn, "code": "flood", "text": "again"})
    say({"t": "closed", "conn": conn})


def babble(conn: int) -> None:
    body = json.dumps({"t": "denied", "conn": conn, "code": "babble"}).encode()
    while True:
        CONTROL.sendall((len(body).to_bytes(4, "little") + body) * 1000)


def descriptor(conn: int) -> None:
    where = {"where": "x\x1b[31m", "secret": "S"}
    say({"t": "alert", "conn": conn, "kind": "secret_in_request", **where}, (os.open("/dev/null", os.O_RDONLY),))


def crash(conn: int) -> None:
    sys.stderr.write("its last words \x1b[31m, and real-value-of-the-secret\n")
    sys.stderr.flush()
    os._exit(3)


def grow(conn: int) -> None:
    """More than its cgroup gives."""
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20)) * 8)


def breed(conn: int) -> None:
    """Tells how many more processes it could have."""
    count = 0
    try:
        while count < 1000:
            if os.fork() == 0:
                signal.pause()
            count += 1
    except BlockingIOError:
        say({"t": "denied", "conn": conn, "code": "breed", "text": str(count)})


def hang(conn: int) -> None:
    signal.pause()


LIES: dict[str, Callable[[int], None]] = {
    "garbage": lambda _: CONTROL.sendall(b"\x10\0\0\0not json at all!"),
    "huge": lambda _: CONTROL.sendall(b"\xff\xff\xff\xff"),
    "stranger": lambda conn: say({"t": "closed", "conn": conn + 1000}),
    "type": lambda conn: say({"t": "dial", "dial": "1", "conn": conn}),
    "unknown": lambda conn: say({"t": "please", "conn": conn}),
    "twice": twice,
    "asks": asks,
    "descriptor": descriptor,
    "flood": flood,
    "babble": babble,
    "crash": crash,
    "hang": hang,
    "grow": grow,
    "breed": breed,
}


class Double:
    def __init__(self) -> None:
        self.data = b""
        self.fds: list[int] = []
        self.state: dict[str, Any] = {"authorities": [], "sandboxes": {}, "trust": 0}
        self.clients: dict[int, int] = {}
        self.pairs: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.number = 0

    def run(self) -> None:
        say({"t": "ready"})
        while True:
            ready, _, _ = select.select([0, *self.pairs], [], [])
            for fd in ready:
                if fd in self.pairs:
                    self.move(fd)
            if 0 in ready:
                self.hear()

    def hear(self) -> None:
        """A descriptor belongs to the message whose first byte it came with."""
        data, ancillary, _, _ = CONTROL.recvmsg(1 << 16, socket.CMSG_SPACE(64))
        if not data:
            sys.exit(0)
        for _, _, packed in ancillary:
            fds = array.array("i")
            fds.frombytes(packed)
            self.fds += list(fds)
        self.data += data
        while len(self.data) >= 4 and len(self.data) >= 4 + int.from_bytes(self.data[:4], "little"):
            length = int.from_bytes(self.data[:4], "little")
            message = json.loads(self.data[4 : 4 + length])
            self.data = self.data[4 + length :]
            getattr(self, "on_" + message["t"])(message)

    def move(self, fd: int) -> None:
        data, other = os.read(fd, 1 << 16), self.pairs[fd]
        if data:
            os.write(other, data)
            return
        for conn in [conn for conn, client in self.clients.items() if client in (fd, other)]:
            del self.clients[conn]
            say({"t": "closed", "conn": conn})
        for end in {fd, other}:
            os.close(end)
            self.pairs.pop(end, None)

    def finish(self, conn: int, text: str) -> None:
        os.write(self.clients[conn], text.encode())
        os.close(self.clients.pop(conn))
        say({"t": "closed", "conn": conn})

    def ask(self, conn: int, message: dict[str, Any]) -> None:
        self.number += 1
        self.waiting[self.number] = conn
        say({"conn": conn, **{name: self.number if value is None else value for name, value in message.items()}})

    def on_authority(self, message: dict[str, Any]) -> None:
        self.state["authorities"].append(message["lineage"])

    def on_trust(self, message: dict[str, Any]) -> None:
        self.state["trust"] = message["pem"].count("BEGIN CERTIFICATE")

    def on_sandbox(self, message: dict[str, Any]) -> None:
        self.state["sandboxes"][message["id"]] = message["secrets"]

    def on_forget(self, message: dict[str, Any]) -> None:
        self.state["sandboxes"].pop(message["id"], None)

    def on_forget_lineage(self, message: dict[str, Any]) -> None:
        self.state["authorities"].remove(message["lineage"])

    def on_open(self, message: dict[str, Any]) -> None:
        conn, how, client = message["conn"], message["host"].partition(".")[0], self.fds.pop(0)
        self.clients[conn] = client
        if how == "echo":
            self.pairs[client] = client
        elif how == "tell":
            self.finish(conn, json.dumps(self.state))
        elif how == "world":
            self.finish(conn, json.dumps(world()))
        elif how in LIES:
            LIES[how](conn)
        else:
            self.ask(conn, {"t": "request", "ask": None, "method": "GET", "path": f"/{how}"})

    def on_verdict(self, message: dict[str, Any]) -> None:
        conn = self.waiting.pop(message["ask"], None)
        if conn is None:
            return
        if message["allow"]:
            self.ask(conn, {"t": "dial", "dial": None})
        else:
            self.finish(conn, f"{message['status']} {message['code']}")

    def on_dialled(self, message: dict[str, Any]) -> None:
        conn = self.waiting.pop(message["dial"])
        if message["error"] is not None:
            self.finish(conn, f"502 {message['error']}")
            return
        client, upstream = self.clients[conn], self.fds.pop(0)
        self.pairs[client], self.pairs[upstream] = upstream, client


if __name__ == "__main__":
    Double().run()
