"""A small gate for tests: the other end of the interceptor's control channel, in a thread, with the real process."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloche_server.interceptor as package
from tests.unit.interceptor import authorities

Message = dict[str, Any]
ROOM = Path(package.__file__).parent
PATIENCE_S = 20.0
MESSAGE_BYTES_MAX = 64 << 10
"""More than this, and the real gate would end the process."""
ALLOWED: Message = {"allow": True, "status": 200, "code": "allowed", "text": "", "rule": "r"}


def wait_until(true: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Polls until `true()` is truthy and gives it."""
    end = time.monotonic() + patience_s
    while not (found := true()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {patience_s} s for {what}")
        time.sleep(0.005)
    return found


def secret(name: str, value: str, *hosts: str, places: list[Message] | None = None, **more: Any) -> Message:
    """A binding as the gate sends it; by default a Bearer token."""
    return {
        "name": name,
        "placeholder": f"cloche_ph_{name.lower()}".ljust(42, "0"),
        "value": base64.b64encode(value.encode()).decode(),
        "hosts": list(hosts),
        "methods": None,
        "paths": None,
        "places": places or [{"kind": "header", "name": "Authorization", "format": "Bearer {}"}],
        "require": False,
        **more,
    }


class Gate:
    """Starts the process; `open` gives a client's socket; messages are kept per connection."""

    def __init__(self, python: Path, log: Path, *command: str | Path) -> None:
        """`command`: what is run instead of main.py."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [python, "-I", "-B", *(command or (ROOM / "main.py",))],
                stdin=theirs,
                stderr=errors,
                env={"LANG": "C.UTF-8"},
            )
        theirs.close()
        self.channel = ours
        self.messages: list[Message] = []
        self.upstreams: dict[tuple[str, int], tuple[str, int] | str] = {}
        self.verdict: Callable[[Message], Message] = lambda asked: ALLOWED
        self.targets: dict[int, tuple[str, int]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self.relays: list[socket.socket] = []
        threading.Thread(target=self._read, daemon=True).start()
        wait_until(lambda: self.of("ready"), "the process")

    def send(self, message: Message, descriptor: socket.socket | None = None) -> None:
        body = json.dumps(message).encode()
        data = struct.pack("<I", len(body)) + body
        with self._lock:
            if descriptor is None:
                self.channel.sendall(data)
            else:
                sent = socket.send_fds(self.channel, [data], [descriptor.fileno()])
                self.channel.sendall(data[sent:])
                descriptor.close()

    def of(self, kind: str, connection: int | None = None) -> list[Message]:
        return [
            m for m in list(self.messages) if m["t"] == kind and (connection is None or m.get("conn") == connection)
        ]

    def denial(self, connection: int) -> Message:
        """The first one of that connection, once it is there."""
        found = wait_until(lambda: self.of("denied", connection), "a denial")
        return dict(found[0])

    def open(
        self, host: str, port: int = 443, *, tls: bool = True, sandbox: str = "s1", lineage: str = "l1"
    ) -> tuple[socket.socket, int]:
        """A client's socket, and the connection's number."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        number = next(self._numbers)
        self.targets[number] = (host, port)
        opened = {"conn": number, "sandbox": sandbox, "lineage": lineage, "host": host, "port": port, "tls": tls}
        self.send({"t": "open", "rule": "r", **opened}, theirs)
        ours.settimeout(PATIENCE_S)
        return ours, number

    def lineage(self, name: str) -> authorities.Pair:
        pair = authorities.authority(f"lineage {name}")
        self.send({"t": "authority", "lineage": name, "cert": pair.cert, "key": pair.key})
        return pair

    def sandbox(self, name: str, *secrets: Message, lineage: str = "l1") -> None:
        self.send({"t": "sandbox", "id": name, "lineage": lineage, "secrets": list(secrets)})

    def peak_bytes(self) -> int:
        """The most memory that the process ever had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def close(self) -> None:
        self.channel.shutdown(socket.SHUT_RDWR)
        self.channel.close()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            for relay in self.relays:
                relay.close()

    def _read(self) -> None:
        stream = self.channel.makefile("rb")
        while len(head := _read(stream, 4)) == 4:
            length = struct.unpack("<I", head)[0]
            assert length <= MESSAGE_BYTES_MAX
            message = json.loads(stream.read(length))
            self.messages.append(message)
            if message["t"] == "dial":
                self._dial(message)
            elif message["t"] == "request":
                threading.Thread(target=self._answer, args=(message,), daemon=True).start()

    def _answer(self, asked: Message) -> None:
        self.send({"t": "verdict", "ask": asked["ask"], **self.verdict(asked)})

    def _dial(self, message: Message) -> None:
        where = self.upstreams.get(self.targets[message["conn"]], "no such upstream")
        answer = {"t": "dialled", "dial": message["dial"], "error": None}
        if isinstance(where, str):
            self.send({**answer, "error": where})
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        relay(ours, socket.create_connection(where, PATIENCE_S))
        self.send(answer, theirs)

    def listen(self, host: str, port: int = 443, **how: Any) -> int:
        """A TCP port on loopback whose connections are opened for that host, for programs that need one."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.relays.append(listener)

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return  # closed with the gate
                relay(client, self.open(host, port, **how)[0])

        threading.Thread(target=accept, daemon=True).start()
        return int(listener.getsockname()[1])


def _read(stream: Any, count: int) -> bytes:
    try:
        return bytes(stream.read(count))
    except (OSError, ValueError):
        return b""  # the process, or this end, is gone


def relay(one: socket.socket, other: socket.socket) -> None:
    """Moves bytes both ways until both ends are over."""
    one.settimeout(None)
    other.settimeout(None)
    for source, sink in ((one, other), (other, one)):
        threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(256 << 10):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, sink):
            with contextlib.suppress(OSError):  # it may be closed already
                each.shutdown(socket.SHUT_RDWR)


class Loop:
    """An event loop in a thread, for servers that the tests need."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
