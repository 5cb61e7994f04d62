"""Mux tests read like transcripts: what the guest says, what the host answers, what the sink hears."""

import json
from collections.abc import Mapping

from cloche_server.channel.credit import Budget
from cloche_server.channel.frames import Decoder, Kind, encode, encode_credit, encode_offset
from cloche_server.channel.outbox import Outbox
from cloche_server.channel.streams import Mux

HELLO = {"gen": 1, "agent": "0.1.0", "arch": "x86_64", "boot": "ab" * 16, "ops": ["exec"]}
JSON_KINDS = {Kind.HELLO, Kind.OPEN, Kind.OPENED, Kind.END, Kind.ABORT, Kind.TELL}


class Ear:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def opened(self, info: dict[str, object]) -> None:
        self.heard.append(f"opened {json.dumps(info)}")

    def data(self, view: memoryview) -> None:
        self.heard.append(f"data {len(view)}")

    def eof(self, offset: int) -> None:
        self.heard.append(f"eof {offset}")

    def end(self, result: dict[str, object]) -> None:
        self.heard.append(f"end {json.dumps(result)}")

    def credit(self, consumed: int, limit: int) -> None:
        self.heard.append(f"credit {consumed} {limit}")

    def lost(self, reason: str) -> None:
        self.heard.append(f"lost {reason}")


class Talk:
    def __init__(self, mux: Mux | None = None, *, node: Budget | None = None, **options: object) -> None:
        self.node = node or Budget(1 << 30)
        self.wakes = 0
        self.mux = mux or Mux(self.node, Outbox(self._woken), **options)  # type: ignore[arg-type]

    def _woken(self) -> None:
        self.wakes += 1

    def guest(self, kind: str, stream: int, payload: bytes | Mapping[str, object] = b"") -> int:
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        useful = 0
        for got_kind, got_stream, view in Decoder().feed(encode(Kind[kind], stream, raw)):
            useful = self.mux.receive(got_kind, got_stream, view)
        return useful

    def credit(self, stream: int, consumed: int, limit: int) -> None:
        self.guest("CREDIT", stream, encode_credit(consumed, limit))

    def eof(self, stream: int, offset: int) -> None:
        self.guest("EOF", stream, encode_offset(offset))

    def host(self) -> list[str]:
        """What the host sent since the last look."""
        said = []
        raw = b"".join(bytes(part) for part in self.mux.outbox.iovecs(1 << 40))
        self.mux.outbox.clear()
        for kind, stream, payload in Decoder().feed(raw):
            said.append(f"{Kind(kind).name} {stream} {_shown(kind, bytes(payload))}".rstrip())
        return said


def _shown(kind: int, payload: bytes) -> str:
    if kind in JSON_KINDS:
        return json.dumps(json.loads(payload))
    if kind == Kind.DATA:
        return str(len(payload))
    if kind in (Kind.CREDIT, Kind.EOF):
        return " ".join(str(int.from_bytes(payload[at : at + 8], "little")) for at in range(0, len(payload), 8))
    return payload.hex()
