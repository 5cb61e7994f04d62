"""The real agent in namespaces of its own, and a host that echoes what programs in there say to the world."""

import asyncio
import hashlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from cloche_server.channel import Budget, ByteReader, Channel, Stream
from cloche_server.channel.messages import JsonObject

AGENT = Path(__file__).parents[2] / "packages/cloche-engine/src/cloche_engine/bin/cloche-guest-x86_64"
CAN_RUN = AGENT.exists() and os.geteuid() == 0 and shutil.which("ip") is not None
WHY_NOT = "needs the guest agent (just setup), and root to make a network namespace"
MIB = 1 << 20
START = """
ip link set lo up
mount --bind "$0" /etc/resolv.conf
exec "$1" --no-mounts --egress
"""
PRELUDE = """
import hashlib, os, socket, struct, sys, threading
PROXY = ("127.127.0.1", 3128)
def connect(address=PROXY):
    s = socket.create_connection(address, timeout=20)
    return s
def rest(s):
    got = bytearray()
    while piece := s.recv(1 << 20):
        got += piece
    return bytes(got)
def query(name, kind, tcp=False):
    labels = b"".join(bytes([len(l)]) + l.encode() for l in name.split(".")) + b"\\0"
    ask = struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + struct.pack(">HH", kind, 1)
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM)
    s.settimeout(5)
    s.connect(("127.127.0.53", 53))
    s.sendall((struct.pack(">H", len(ask)) if tcp else b"") + ask)
    got = s.recv(2048)[2 if tcp else 0:]
    assert got[:2] == ask[:2]
    return got[3] & 15, got[7], socket.inet_ntoa(got[-4:]) if got[7] else None
"""


async def everything(reader: ByteReader) -> bytes:
    return b"".join([piece async for piece in reader])


class Echo:
    """A host that says everything back, and a last word after the client's last. Takes no more than it could send."""

    def __init__(self, stream: Stream, last_word: bytes = b"") -> None:
        self.heard = hashlib.sha256()
        self.bytes = 0
        self.reason = ""
        self.over = asyncio.Event()
        self._stream = stream
        self._last_word = last_word
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while (piece := await self._waiting.get()) is not None:
            await self._stream.writable()
            self._stream.send(piece)
            self.bytes += len(piece)
            self._stream.consumed(self.bytes)
        self._stream.send(self._last_word)
        self._stream.eof()
        await self._stream.writable()
        self._stream.end({"ok": {}})
        self.over.set()

    def opened(self, info: JsonObject) -> None: ...

    def data(self, view: memoryview) -> None:
        self.heard.update(view)
        self._waiting.put_nowait(bytes(view))

    def eof(self, offset: int) -> None:
        self._waiting.put_nowait(None)

    def end(self, result: JsonObject) -> None: ...

    def credit(self, consumed: int, limit: int) -> None: ...

    def lost(self, reason: str) -> None:
        self.reason = reason
        self._task.cancel()
        self.over.set()


class Host:
    """The agent in namespaces of its own, and what its host does with the streams that it opens."""

    def __init__(self, folder: Path) -> None:
        resolv = folder / "resolv.conf"
        resolv.write_text("nameserver 127.127.0.53\noptions timeout:1 attempts:1\n")
        self.kept, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            ["unshare", "--net", "--mount", "--", "sh", "-ec", START, resolv, AGENT],
            stdin=theirs.fileno(),
            start_new_session=True,
        )
        theirs.close()
        self.budget = Budget(256 * MIB)
        self.lost: list[str] = []
        self.asked: list[JsonObject] = []
        self.echoes: list[Echo] = []
        self.ports: dict[str, list[int]] = {"db.example.com": [5432, 443]}
        self.on_open: Callable[[Stream, JsonObject], None] = self.echo
        self.on_resolve: Callable[[Stream, JsonObject], None] = self.resolve
        self.channel: Channel

    def echo(self, stream: Stream, fields: JsonObject) -> None:
        echo = Echo(stream)
        self.echoes.append(echo)
        stream.accept(echo)

    def resolve(self, stream: Stream, fields: JsonObject) -> None:
        stream.end({"ok": {"ports": self.ports.get(str(fields["name"]), [])}})

    def guest_open(self, stream: Stream, op: str, fields: JsonObject) -> None:
        self.asked.append(fields)
        if op == "resolve":
            self.on_resolve(stream, fields)
        else:
            self.on_open(stream, fields)

    async def attach(self) -> None:
        async with asyncio.timeout(5):
            self.channel = await Channel.fresh(
                self.kept.dup(), guest_open=self.guest_open, budget=self.budget, on_lost=self.lost.append
            )
            end, _ = await self.channel.call("bind", {"user": "0", "egress": {"proxy_port": 3128}})
        assert end["warnings"] == []

    async def run(self, script: str, *arguments: str, slot: int | None = None) -> str:
        """A Python program in the guest; what it printed. It must end well."""
        stream, out, err = self.start(script, *arguments, slot=slot)
        async with asyncio.timeout(30):
            printed, complaint = await asyncio.gather(everything(out), everything(err))
            result = await stream.result
        stream.confirm()
        assert result.get("ok", {}).get("code") == 0, complaint.decode()  # type: ignore[attr-defined]
        return printed.decode()

    def start(self, script: str, *arguments: str, slot: int | None = None) -> tuple[Stream, ByteReader, ByteReader]:
        fields: dict[str, object] = {
            "command": os.urandom(8).hex(),
            "argv": [sys.executable, "-Ic", f"{PRELUDE}{script}", *arguments],
        }
        if slot is not None:
            fields["proxy_slot"] = slot
        out, err = ByteReader(), ByteReader()
        stream = self.channel.open("exec", fields, sink=out, extra_streams=1, extra_sinks=[err])
        out.attach(stream)
        err.attach(stream.extra[0])
        return stream, out, err

    def end(self) -> None:
        self.channel.close("test over")
        self.kept.close()
        self.process.kill()
        self.process.wait()


@asynccontextmanager
async def echoing(folder: Path) -> AsyncIterator[Host]:
    """Ends it all, and says so when a channel broke or a window did not come back."""
    host = Host(folder)
    await host.attach()
    yield host
    host.end()
    assert host.lost == []
    assert host.budget.bytes_used == 0
