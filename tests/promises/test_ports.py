"""EXE-8: a server inside is reached by `cloche port`, the SDK and the API, by its owner and by nobody else."""

from __future__ import annotations

import hashlib
import http.client
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cloche.client import Sandbox
from cloche.errors import ConnectionRefused
from tests.promises.nodes import CLI, RealNode, wait_until
from tests.promises.wires import MIB, peak_of

pytestmark = pytest.mark.req("EXE-8")
SERVED, RAW, NOBODY = 8000, 8001, 8002
STRANGER = 54321
SERVER = """
import hashlib, http.server, socket, socketserver, sys, threading

class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        left, digest = int(self.headers["content-length"]), hashlib.sha256()
        while left:
            data = self.rfile.read(min(left, 1 << 20))
            digest.update(data)
            left -= len(data)
        self.answer(digest.hexdigest().encode())

    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers["content-length"])))

    def do_GET(self):
        self.answer(b"hello from inside " + self.path.encode())

    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

class Count(socketserver.StreamRequestHandler):
    def handle(self):
        digest = hashlib.sha256()
        while data := self.rfile.read1(1 << 16):
            digest.update(data)
        self.wfile.write(digest.hexdigest().encode())

raw = socketserver.ThreadingTCPServer(("127.0.0.1", int(sys.argv[2])), Count)
threading.Thread(target=raw.serve_forever, daemon=True).start()
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer)
print("listening", flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def box(node: RealNode) -> Iterator[Sandbox]:
    """A sandbox with servers in it."""
    with node.sandbox(ttl_s=3600) as made:
        job = made.commands.start(["python3", "-c", SERVER, str(SERVED), str(RAW)])
        assert next(iter(job.output())).data == b"listening\n"
        yield made


@contextmanager
def forwarded(node: RealNode, *arguments: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """`cloche port` while the block runs, ended by Ctrl-C; the local port."""
    process = subprocess.Popen(
        [str(CLI), "port", *arguments],
        env=node.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    try:
        said = process.stdout.readline()
        found = re.search(r"127\.0\.0\.1:(\d+)", said)
        assert found, said + process.stdout.read()
        yield int(found[1]), process
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_cloche_port(node: RealNode, box: Sandbox, seed: int) -> None:
    data = random.Random(seed).randbytes(8 * MIB)
    with forwarded(node, box.id, f"{SERVED}:0") as (port, _), peak_of(node.pid) as peak:
        web = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        web.request("GET", "/path")
        assert web.getresponse().read() == b"hello from inside /path"
        web.request("PUT", "/up", body=data)
        assert web.getresponse().read().decode() == hashlib.sha256(data).hexdigest()
        web.request("POST", "/both", body=data)
        assert hashlib.sha256(web.getresponse().read()).digest() == hashlib.sha256(data).digest()
        web.close()
    print(f"16 MiB in and 8 MiB out; the daemon grew {peak.grown / MIB:.1f} MiB")
    assert peak.grown < 64 * MIB
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 5):
        pass


def test_many_connections_at_once(node: RealNode, box: Sandbox, long_run: bool) -> None:
    count = 100 if long_run else 20
    bodies: dict[int, bytes] = {}

    def ask(port: int, number: int) -> None:
        web = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        web.request("GET", f"/{number}")
        bodies[number] = web.getresponse().read()
        web.close()

    with box.ports.forward(SERVED) as forward:
        threads = [threading.Thread(target=ask, args=(forward.local_port, number)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert bodies == {number: b"hello from inside /%d" % number for number in range(count)}


def test_the_sdk_connects_and_half_closes(box: Sandbox, seed: int) -> None:
    """The server answers only after end of file; the answer still comes."""
    data = random.Random(seed).randbytes(3 * MIB + 1)
    with box.connect_port(RAW) as connection:
        for at in range(0, len(data), 100_000):
            connection.send(data[at : at + 100_000])
        connection.send_eof()
        got = b""
        while part := connection.receive():
            got += part
    assert got.decode() == hashlib.sha256(data).hexdigest()


def test_half_close_through_a_forward(box: Sandbox, seed: int) -> None:
    data = random.Random(seed).randbytes(MIB)
    with box.ports.forward(RAW) as forward, socket.create_connection(forward.address, 60) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        assert connection.makefile("rb").read().decode() == hashlib.sha256(data).hexdigest()


def test_refused_when_nobody_listens(node: RealNode, box: Sandbox) -> None:
    with pytest.raises(ConnectionRefused):
        box.connect_port(NOBODY)
    with forwarded(node, box.id, f"{NOBODY}:0") as (port, process):
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            assert closed(connection)
        assert process.stdout
        assert "connection_refused" in process.stdout.readline()
    bad = node.cloche("port", box.id, "70000")
    assert bad.returncode == 2


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(10) == b""
    except ConnectionResetError:
        return True


def test_nothing_of_it_listens_on_the_host(box: Sandbox) -> None:
    for address in ("127.0.0.1", "::1", socket.gethostname()):
        with pytest.raises(OSError), socket.create_connection((address, SERVED), 5):
            pass


@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed")
def test_another_user_does_not_reach_it(node: RealNode, box: Sandbox) -> None:
    """The same socket, another uid: for him there is no such sandbox, by any of the three ways."""
    setpriv = [shutil.which("setpriv") or "setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
    program = f"""
from cloche.client import Node
from cloche.client._target import parse_url
from cloche.errors import ClocheError
import os
assert os.getuid() == {STRANGER}
with Node(parse_url({node.environment["CLOCHE_URL"]!r}, None)) as node:
    assert node.list() == []
    for path in ("", "/ports/{SERVED}", "/files?path=/etc/passwd", "/commands"):
        try:
            if "ports" in path:
                node.transport.open_socket("/v1/sandboxes/{box.id}" + path)
            else:
                node.transport.request("GET", "/v1/sandboxes/{box.id}" + path)
            print(path, "reached")
        except ClocheError as raised:
            print(path, raised.code)
"""
    env = {**node.environment, "HOME": "/nonexistent"}
    done = subprocess.run(
        [*setpriv, sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert {line.split()[-1] for line in done.stdout.splitlines()} == {"not_found"}, done.stdout
    assert len(done.stdout.splitlines()) == 4
    port = subprocess.run(
        [*setpriv, str(CLI), "port", box.id, f"{SERVED}:0"], env=env, capture_output=True, timeout=60, check=False
    )
    assert (port.returncode, b"not_found" in port.stderr) == (125, True), port.stderr


def test_a_connection_ends_with_its_sandbox(node: RealNode) -> None:
    with node.sandbox() as box:
        program = "import socket; s = socket.create_server(('127.0.0.1', 9)); print('up', flush=True); c, _ = s.accept(); c.recv(1)"
        job = box.commands.start(["python3", "-c", program], user="root")
        assert next(iter(job.output())).data == b"up\n"
        with box.ports.forward(9) as forward, socket.create_connection(forward.address, 30) as connection:
            wait_until(lambda: box.info().ended is None)
            box.kill()
            connection.settimeout(30)
            assert closed(connection)
