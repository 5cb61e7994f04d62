"""Connections of programs in the guest, from the agent's addresses to a host that echoes: real sockets."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cloche_server.channel import ByteReader, Channel, OperationFailed, Stream
from cloche_server.channel.messages import JsonObject
from tests.contract.echo_host import CAN_RUN, MIB, WHY_NOT, Echo, Host, echoing, everything

pytestmark = [pytest.mark.req("NET-1"), pytest.mark.skipif(not CAN_RUN, reason=WHY_NOT)]


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with echoing(tmp_path) as host:
        yield host


async def test_bytes_both_ways_and_a_half_close(host: Host) -> None:
    def with_last_word(stream: Stream, fields: JsonObject) -> None:
        stream.accept(Echo(stream, b"bye"))

    host.on_open = with_last_word
    said = await host.run("""
s = connect()
s.sendall(b"hello")
assert s.recv(100) == b"hello"
s.sendall(b"more")
s.shutdown(socket.SHUT_WR)
print(rest(s).decode())
""")
    assert said == "morebye\n"
    assert host.asked == [{"op": "proxy", "slot": 0}]
    assert host.channel.stats.streams_open == 0


async def test_the_hosts_half_close(host: Host) -> None:
    """The server has said all, and still listens."""
    heard = ByteReader()

    def greet(stream: Stream, fields: JsonObject) -> None:
        stream.accept(heard)
        stream.send(b"greeting")
        stream.eof()

    host.on_open = greet
    said = await host.run("s = connect(); print(rest(s).decode()); s.sendall(b'thanks'); s.close()")
    assert said == "greeting\n"
    async with asyncio.timeout(5):
        assert await everything(heard) == b"thanks"


async def test_each_command_has_its_own_slot(host: Host) -> None:
    for slot in (1, 63, 1):
        await host.run("s = connect(('127.127.0.' + sys.argv[1], 3128)); s.close()", str(1 + slot), slot=slot)
    assert [fields["slot"] for fields in host.asked] == [1, 63, 1]
    await host.run("""
try:
    connect(("127.127.0.9", 3128))
except ConnectionRefusedError:
    sys.exit()
sys.exit("somebody listens there")
""")


async def test_refused_with_a_reset(host: Host) -> None:
    host.on_open = lambda stream, fields: stream.refuse("refused", "no")
    await host.run("""
for _ in range(20):
    try:
        s = connect()
        s.sendall(b"x")
        if s.recv(1) == b"":
            sys.exit("an end, not a reset")
    except ConnectionResetError:
        pass
""")
    assert len(host.asked) == 20


class Refuser(ByteReader):
    """Takes nothing: it answers when the client's first window is full, so that more is on its way."""

    def __init__(self, stream: Stream, answer: bytes) -> None:
        super().__init__()
        self._guest, self._answer = stream, answer

    def data(self, view: memoryview) -> None:
        if self._guest.received == 65_536:
            self._guest.send(self._answer)
            self._guest.eof()
            self._guest.end({"ok": {}})


async def test_last_words_reach_a_client_that_still_sends(host: Host) -> None:
    """An END with bytes of the client still unread must not take the answer back from it."""
    refusal = b"HTTP/1.1 403 no\r\n\r\n" + b"x" * 50_000
    host.on_open = lambda stream, fields: stream.accept(Refuser(stream, refusal))
    lengths = await host.run("""
def send(s):
    try:
        s.sendall(bytes(300_000))
    except OSError:
        pass
for _ in range(10):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the answer cannot be there already
    s.connect(PROXY)
    sender = threading.Thread(target=send, args=[s])
    sender.start()
    print(len(rest(s)))
    s.close()
    sender.join()
""")
    assert lengths.split() == [str(len(refusal))] * 10


async def test_a_client_that_resets_is_given_up(host: Host) -> None:
    await host.run("""
s = connect()
s.sendall(b"x")
s.recv(1)
s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
s.close()
""")
    async with asyncio.timeout(5):
        await host.echoes[0].over.wait()
    assert host.echoes[0].reason == "aborted"
    assert await host.run("s = connect(); s.sendall(b'y'); print(s.recv(1).decode())") == "y\n"


async def test_a_new_daemon_drops_tunnels_and_goes_on(host: Host) -> None:
    stream, out, _ = host.start(
        """
s = connect()
s.sendall(b"x")
assert s.recv(1) == b"x"
print("up", flush=True)
try:
    print(s.recv(1))
except ConnectionResetError:
    print("reset")
s = connect()
s.sendall(b"again")
open(sys.argv[1], "wb").write(s.recv(5))
""",
        str(host_file := Path("/tmp") / f"cloche-egress-{os.getpid()}"),
    )
    assert await anext(out) == b"up\n"
    assert stream.id == 4
    # The command itself must outlive the change, so that it can say what became of its connection.
    host.channel.close("the daemon died")
    host.channel, kept = await Channel.reattach(
        host.kept.dup(),
        logged=lambda streams: {number: state.sent for number, state in streams.items()},
        guest_open=host.guest_open,
        budget=host.budget,
        on_lost=host.lost.append,
    )
    readers = {}
    for number, state in kept.items():
        readers[number] = ByteReader()
        adopted = host.channel.adopt(number, state, sink=readers[number])
        readers[number].attach(adopted)
        if number == stream.id:
            stream = adopted
    async with asyncio.timeout(20):
        assert (await everything(readers[stream.id])).decode() == "reset\n"
        result = await stream.result
    stream.confirm()
    assert result["ok"]["code"] == 0  # type: ignore[index]
    assert host_file.read_bytes() == b"again"
    host_file.unlink()
    assert host.echoes[0].reason == "the daemon died"


async def test_more_connections_than_there_is_room_for(host: Host) -> None:
    said = await host.run("""
import time
sockets = [connect() for _ in range(300)]
for n, s in enumerate(sockets):
    s.sendall(b"%d" % n)
got = []
for n, s in enumerate(sockets):
    got.append(s.recv(10) == b"%d" % n)
    s.close()
print(len(got), all(got))
""")
    assert said == "300 True\n"
    assert host.channel.stats.streams_open == 0


async def test_much_both_ways(host: Host) -> None:
    said = await host.run("""
s = connect()
block = os.urandom(1 << 20)
def send():
    for _ in range(64):
        s.sendall(block)
    s.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
got, count = hashlib.sha256(), 0
while piece := s.recv(1 << 20):
    got.update(piece)
    count += len(piece)
whole = hashlib.sha256()
for _ in range(64):
    whole.update(block)
print(count, got.digest() == whole.digest(), got.hexdigest())
""")
    count, same, digest = said.split()
    assert (count, same) == (str(64 * MIB), "True")
    assert host.echoes[0].heard.hexdigest() == digest


async def test_a_client_that_never_reads_holds_nobody_up(host: Host) -> None:
    def pour(stream: Stream, fields: JsonObject) -> None:
        stream.accept(ByteReader())
        for _ in range(16):
            stream.send(bytes(65_536))

    host.on_open = pour
    stream, out, _ = host.start("s = connect(); print('up', flush=True); sys.stdin.read(); threading.Event().wait()")
    assert await anext(out) == b"up\n"
    host.on_open = host.echo
    assert await host.run("s = connect(); s.sendall(b'y'); print(s.recv(1).decode())") == "y\n"
    stream.abort("enough")
    await stream.result
    stream.confirm()


async def test_trust_needs_mounts(host: Host) -> None:
    async def content() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"-----BEGIN" * 10_000

    with pytest.raises(OperationFailed, match="mounts nothing"):
        await host.channel.call("trust", {"name": "trust.pem"}, data=content())
    with pytest.raises(OperationFailed, match="no trust file"):
        await host.channel.call("trust", {"name": "../etc/passwd"})
