"""An agent that lies, for tests: `evil_agent.py MISCHIEF`. It greets, answers `bind`, and then misbehaves."""

import os
import socket
import sys

from cloche_server.channel.frames import Decoder, Kind, decode_json, encode, encode_json

HELLO = {"gen": 1, "agent": "evil", "arch": "x86_64", "boot": "0" * 32, "ops": ["bind", "exec"]}


def misbehave(channel: socket.socket, mischief: str, stream: int) -> None:
    """`stream` is the first command's."""
    opened = encode(Kind.OPENED, stream, encode_json({"pid": 7}))
    if mischief == "garbage":
        channel.sendall(os.urandom(1 << 20))
    elif mischief == "beyond_window":
        channel.sendall(opened + encode(Kind.DATA, stream, bytes(100_000)) * 4)
    elif mischief == "end_twice":
        channel.sendall(opened + encode(Kind.END, stream, encode_json({"ok": {"code": 0}})) * 2)
    elif mischief == "data_after_end":
        end = encode(Kind.END, stream, encode_json({"ok": {"code": 0}}))
        channel.sendall(opened + end + encode(Kind.DATA, stream, b"x"))
    elif mischief == "foreign_stream":
        channel.sendall(encode(Kind.END, 4242, encode_json({"ok": {}})))
    elif mischief == "credit_back":
        channel.sendall(opened + encode(Kind.CREDIT, stream, bytes(16)))
    elif mischief == "strange_end":
        channel.sendall(
            opened + encode(Kind.END, stream, encode_json({"ok": {"code": "\x1b]52;c;x\x07", "signal": [1]}}))
        )
    elif mischief == "escapes":
        error = {"code": "io", "message": "\x1b[2J\x1b]52;c;aGk=\x07\u202eevil" * 100}
        channel.sendall(encode(Kind.END, stream, encode_json({"error": error})))
    elif mischief == "open_many":
        for number in range(1, 200_001, 2):
            channel.sendall(encode(Kind.OPEN, number, encode_json({"op": "connect", "host": "x"})))
    elif mischief == "hang_up":
        channel.close()
        os.close(0)


def main() -> None:
    channel, decoder = socket.socket(fileno=os.dup(0)), Decoder()
    channel.setblocking(True)
    channel.sendall(encode(Kind.HELLO, 0, encode_json(HELLO)))
    done = False
    while data := channel.recv(65536):
        for kind, stream, payload in decoder.feed(data):
            if kind == Kind.OPEN and decode_json(payload)["op"] == "bind":
                channel.sendall(encode(Kind.END, stream, encode_json({"ok": {"users": True}})))
            elif kind == Kind.OPEN and not done:
                done = True
                misbehave(channel, sys.argv[1], stream)


if __name__ == "__main__":
    main()
