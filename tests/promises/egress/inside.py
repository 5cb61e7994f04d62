"""What tests let run inside: raw exchanges with the proxy or with a name, many in one command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from cloche.client import Sandbox

PROXY = ("127.127.0.2", 3128)
"""Of the first slot: what a command that runs alone has in HTTP_PROXY."""

TALK = """
import json, socket, sys, time
def talk(to, pieces, pause, wait):
    got = b""
    try:
        with socket.create_connection(tuple(to), 5) as s:
            for piece in pieces:
                s.sendall(bytes.fromhex(piece))
                if pause: time.sleep(pause)
            end = time.monotonic() + wait
            while len(got) < 65536:
                s.settimeout(max(0.01, end - time.monotonic()))
                more = s.recv(65536)
                if not more: return got, "closed"
                got += more
            return got, "more"
    except TimeoutError: return got, "open"
    except OSError as e: return got, e.__class__.__name__
print(json.dumps([(got.hex(), end) for got, end in (talk(**one) for one in json.load(sys.stdin))]))
"""


@dataclass(frozen=True)
class Said:
    """What came back, and how it ended: `closed`, `open` (still, after the wait), or the error's name."""

    data: bytes
    end: str

    @property
    def status(self) -> int:
        """Of an HTTP answer; 0 if it is none."""
        words = self.data.split(b" ", 2)
        return int(words[1]) if words[0].startswith(b"HTTP/1.") and len(words) > 1 else 0

    @property
    def code(self) -> str:
        """Why it was refused, as the answer's header says."""
        for line in self.data.split(b"\r\n\r\n", 1)[0].split(b"\r\n"):
            if line.lower().startswith(b"x-cloche-denied:"):
                return line.split(b":", 1)[1].strip().decode()
        return ""


def talk(
    box: Sandbox,
    *sends: bytes | Sequence[bytes],
    to: tuple[str, int] = PROXY,
    wait_s: float = 3.0,
    pause_s: float = 0.0,
) -> list[Said]:
    """Each is a connection of its own; several pieces are sent one after another."""
    asked = [
        {
            "to": to,
            "pieces": [piece.hex() for piece in ([each] if isinstance(each, bytes) else each)],
            "pause": pause_s,
            "wait": wait_s,
        }
        for each in sends
    ]
    result = box.run(["python3", "-c", TALK], stdin=json.dumps(asked), timeout_s=300, check=True)
    return [Said(bytes.fromhex(got), end) for got, end in json.loads(result.stdout)]


def connect(host: str, port: int = 443) -> bytes:
    target = f"{host}:{port}".encode("utf-8", "surrogateescape")
    return b"CONNECT " + target + b" HTTP/1.1\r\nHost: " + target + b"\r\n\r\n"


def get(url: str, *headers: str, method: str = "GET") -> bytes:
    """Absolute form; Host agrees unless `headers` has one."""
    host = url.split("/")[2].rpartition("@")[2]
    lines = [*headers] if any(line.lower().startswith("host:") for line in headers) else [f"Host: {host}", *headers]
    return "\r\n".join([f"{method} {url} HTTP/1.1", *lines, "", ""]).encode("utf-8", "surrogateescape")


def socks(name: bytes, port: int = 443) -> list[bytes]:
    """Greeting, and CONNECT by name."""
    return [b"\x05\x01\x00", b"\x05\x01\x00\x03" + bytes([len(name)]) + name + port.to_bytes(2, "big")]


def hello(name: str | None) -> bytes:
    """The first flight of a real TLS client that names this server."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = context.wrap_bio(incoming, outgoing, server_hostname=name)
    try:
        connection.do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake with nobody")
