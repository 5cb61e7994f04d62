"""The guest's resolver and its synthetic addresses: names become connections, and nothing else becomes anything."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloche_server.channel import Stream
from tests.contract.echo_host import CAN_RUN, WHY_NOT, Host, echoing, everything

pytestmark = [pytest.mark.req("NET-10"), pytest.mark.skipif(not CAN_RUN, reason=WHY_NOT)]


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with echoing(tmp_path) as host:
        yield host


async def test_a_name_becomes_an_address_and_a_connection(host: Host) -> None:
    said = await host.run("""
addresses = {info[4] for info in socket.getaddrinfo("DB.example.com", 5432, proto=socket.IPPROTO_TCP)}
(address,) = addresses
for port in (5432, 443):
    s = connect((address[0], port))
    s.sendall(b"select")
    assert s.recv(10) == b"select"
    s.close()
print(address[0])
""")
    assert said == "127.64.0.1\n"
    assert {"op": "connect", "name": "db.example.com", "port": 5432} in host.asked
    assert {"op": "connect", "name": "db.example.com", "port": 443} in host.asked
    assert sum(fields["op"] == "resolve" for fields in host.asked) == 1, "A and AAAA are one question to the host"


async def test_what_the_resolver_says(host: Host) -> None:
    host.ports["second.example"] = [80]
    said = await host.run("""
for name, kind in [
    ("db.example.com", 1), ("db.example.com", 28), ("db.example.com", 65), ("db.example.com", 16),
    ("second.example", 1), ("db.example.com", 1),
    ("pastebin.example", 1), ("pastebin.example", 28), ("pastebin.example", 65),
    ("localhost", 1), ("x.localhost", 28), ("1.0.0.127.in-addr.arpa", 12),
]:
    print(name, kind, *query(name, kind, tcp=kind == 65))
""")
    assert said.splitlines() == [
        "db.example.com 1 0 1 127.64.0.1", "db.example.com 28 0 0 None", "db.example.com 65 0 0 None",
        "db.example.com 16 0 0 None", "second.example 1 0 1 127.64.0.2", "db.example.com 1 0 1 127.64.0.1",
        "pastebin.example 1 3 0 None", "pastebin.example 28 3 0 None", "pastebin.example 65 3 0 None",
        "localhost 1 0 1 127.0.0.1", "x.localhost 28 0 0 None", "1.0.0.127.in-addr.arpa 12 3 0 None",
    ]  # fmt: skip
    asked = [fields["name"] for fields in host.asked]
    assert asked == ["db.example.com", "second.example", "pastebin.example"]


async def test_new_ports_come_with_the_next_question(host: Host) -> None:
    script = """
import time
address = query("db.example.com", 1)[2]
def listens(port):
    try:
        connect((address, port)).close()
        return True
    except ConnectionRefusedError:
        return False
print(listens(443), listens(8443), flush=True)
deadline = time.monotonic() + 15
while not listens(8443) and time.monotonic() < deadline:
    time.sleep(0.2)
    assert query("db.example.com", 1)[2] == address
print(listens(443), listens(8443))
"""
    stream, out, _ = host.start(script)
    assert await anext(out) == b"True False\n"
    host.ports["db.example.com"] = [443, 8443]
    async with asyncio.timeout(20):
        assert await everything(out) == b"True True\n"
        await stream.result
    stream.confirm()


async def test_hostile_questions(host: Host) -> None:
    said = await host.run(
        """
import random
random.seed(int(sys.argv[1]))
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for n in range(3000):
    head = bytes(random.choice([0, 0, 0, 1, 255]) for _ in range(12)) if n % 3 else struct.pack(">HHHHHH", n, 0, 1, 0, 0, 0)
    u.sendto(head + random.randbytes(random.randrange(400)), ("127.127.0.53", 53))
askers = [connect(("127.127.0.53", 53)) for _ in range(40)]
for s in askers:
    try:
        s.sendall(random.randbytes(5000))
    except OSError:
        pass
print(*query("db.example.com", 1))
for s in askers:
    s.close()
print(*query("db.example.com", 1, tcp=True))
""",
        "5",
    )
    assert said == "0 1 127.64.0.1\n" * 2
    names = {str(fields["name"]) for fields in host.asked}
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.") and len(name) <= 253 for name in names)


async def test_a_host_that_does_not_answer_is_not_asked_without_end(host: Host) -> None:
    waiting: list[Stream] = []
    host.on_resolve = lambda stream, fields: waiting.append(stream)
    stream, out, _ = host.start("""
sockets, codes = [], []
for n in range(100):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.connect(("127.127.0.53", 53))
    name = b"\\x04n%03d\\x07example\\0" % n
    s.send(struct.pack(">HHHHHH", n, 0x100, 1, 0, 0, 0) + name + struct.pack(">HH", 1, 1))
    sockets.append(s)
for s in sockets[64:]:
    s.settimeout(10)
    codes.append(s.recv(512)[3] & 15)
print(codes == [2] * 36, flush=True)
codes = [s.recv(512)[3] & 15 for s in sockets[:64]]
print(codes == [3] * 64)
""")
    assert await anext(out) == b"True\n"
    assert len(waiting) == 64
    for each in waiting:
        each.refuse()
    async with asyncio.timeout(20):
        assert await everything(out) == b"True\n"
        await stream.result
    stream.confirm()
