"""The guest's end of egress inside every engine: a program's name, connection and trust, seen from the channel."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.unit.keeper import harness
from tests.unit.keeper.harness import DATA, END, OPEN, Guest, Node, frame, spec

EOF = 6
ENGINES = [
    "gvisor",
    pytest.param(
        "qemu", marks=pytest.mark.skipif(not harness.has_microvm(), reason="no microVM kernel was built here")
    ),
]
PROGRAM = """
import socket
with socket.create_connection(("db.example.com", 5432), timeout=20) as s:
    s.sendall(b"select")
    print(s.recv(9).decode(), s.getpeername())
with socket.create_connection(("127.127.0.2", 3128), timeout=20) as s:
    s.sendall(b"CONNECT")
    s.shutdown(socket.SHUT_WR)
    print(s.recv(9).decode(), s.recv(9))
try:
    socket.getaddrinfo("evil.example", 80)
except OSError as error:
    print(error)
print(open("/etc/ssl/certs/ca-certificates.crt").read(5), open("/run/cloche/trust.pem").read(5))
"""


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with harness.node() as made:
        made.ask("start_watch")
        yield made


@pytest.mark.req("NET-10")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(180)
def test_the_way_out_begins_in_the_guest(node: Node, engine: str) -> None:
    wanted = spec(engine)
    node.boot(wanted)
    node.ask("start", sandbox=wanted.id)
    guest = Guest(node, wanted.id)
    assert "trust" in guest.hello()["ops"]
    node.ask("seal", sandbox=wanted.id)

    def say(kind: int, stream: int, payload: bytes) -> None:
        node.ask("send", sandbox=wanted.id, hexed=frame(kind, stream, payload).hex())

    for _ in range(2):  # a restored sandbox is bound and told again
        bound = guest.result(guest.open("bind", hostname="box", egress={"proxy_port": 3128}))
        assert bound["ok"]["warnings"] == []
        trust = guest.open("trust", name="trust.pem")
        say(DATA, trust, b"-----A CERTIFICATE")
        say(EOF, trust, (18).to_bytes(8, "little"))
        assert guest.result(trust) == {"ok": {"over": ["/etc/ssl/certs/ca-certificates.crt"]}}
    command = guest.open("exec", command="c", argv=["/usr/bin/python3", "-c", PROGRAM], user="1000:1000", proxy_slot=1)
    assert json.loads(guest.expect(OPEN, 1)) == {"op": "resolve", "name": "db.example.com", "type": 1}
    say(END, 1, b'{"ok": {"ports": [5432]}}')
    assert json.loads(guest.expect(OPEN, 3)) == {"op": "connect", "name": "db.example.com", "port": 5432}
    assert guest.expect(DATA, 3) == b"select"
    say(DATA, 3, b"rows")
    assert json.loads(guest.expect(OPEN, 5)) == {"op": "proxy", "slot": 1}
    assert guest.expect(EOF, 5) == (7).to_bytes(8, "little")
    say(DATA, 5, b"403")
    say(END, 5, b'{"ok": {}}')
    assert json.loads(guest.expect(OPEN, 7))["name"] == "evil.example"
    say(END, 7, b'{"ok": {"ports": []}}')
    assert guest.result(command)["ok"]["code"] == 0
    assert guest.output(command).decode().splitlines() == [
        "rows ('127.64.0.1', 5432)",
        "403 b''",
        "[Errno -2] Name or service not known",
        "----- -----",
    ]
    node.ask("kill", sandbox=wanted.id)
