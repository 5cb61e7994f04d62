"""Much, through the real gate and the real interceptor: thousands of changed requests, a GiB each way, a client that takes nothing.

Changed requests come from the seed in the header of the run, so a failure can be repeated.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cloche.client import Sandbox
from cloche.wire.egress import EgressLimits, EgressRecord, EgressRule
from tests.promises.egress.inside import PROXY
from tests.promises.egress.worlds import WEB, World, needs_clients, needs_world, processes
from tests.promises.nodes import RealNode
from tests.unit.interceptor.mutations import mutated

pytestmark = [needs_world, needs_clients]

NAME = "COUNTED_KEY"
BATCH = 250
MEMORY_BYTES_MAX = 100_000_000
"""Of one interceptor, whatever goes through it."""
CROWDED_BYTES_MAX = 160_000_000
"""With all the connections that one sandbox may have, each of them stuck; the kernel ends it at 256 MiB."""
BLOCK = bytes(range(256)) * 256

SAY = """
import json, socket, ssl, sys
from concurrent.futures import ThreadPoolExecutor
context = ssl.create_default_context()
context.set_alpn_protocols(["http/1.1"])
name = sys.argv[1]
def one(said):
    kind, at, payload = said
    try:
        with socket.create_connection(tuple(at), 20) as plain:
            with context.wrap_socket(plain, server_hostname=name) if kind == "tls" else plain as s:
                s.sendall(bytes.fromhex(payload))
                s.settimeout(0.5)
                return s.recv(4096).split(b"\\r\\n")[0].decode("latin-1")
    except OSError as e: return e.__class__.__name__
with ThreadPoolExecutor(8) as pool: print(json.dumps(list(pool.map(one, json.load(sys.stdin)))))
"""
UPLOAD = """
import sys
block = bytes(range(256)) * 256
for _ in range(int(sys.argv[1]) // len(block)): sys.stdout.buffer.write(block)
"""
NEVER = """
import socket, ssl, sys, time
import h2.config, h2.connection, h2.events
name, size, clients = sys.argv[1], sys.argv[2], int(sys.argv[3])
context = ssl.create_default_context()
context.set_alpn_protocols(["h2"])
held = []
for _ in range(clients):
    s = context.wrap_socket(socket.create_connection((name, 443)), server_hostname=name)
    c = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    c.initiate_connection()
    pairs = [(":method", "GET"), (":scheme", "https"), (":authority", name), (":path", "/bytes/" + size)]
    c.send_headers(1, pairs, end_stream=True)
    s.sendall(c.data_to_send())
    s.settimeout(0.02)
    held.append((s, c))
end, got = time.monotonic() + 10, [0] * clients
while time.monotonic() < end:
    for number, (s, c) in enumerate(held):
        try: data = s.recv(65536)
        except TimeoutError: continue
        if not data: sys.exit("closed")
        got[number] += sum(len(e.data) for e in c.receive_data(data) if isinstance(e, h2.events.DataReceived))
print(*got)
"""


@pytest.fixture(params=["without a secret", "with a secret"])
def holds_secret(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "with a secret")


@contextmanager
def sandbox(node: RealNode, rule: EgressRule, *, holds_secret: bool) -> Iterator[Sandbox]:
    """With a secret, what it sends is searched and what it gets is searched too."""
    with node.client() as client:
        place = {"kind": "header", "name": "authorization", "format": "Bearer {}"}
        client.secrets.set(NAME, "a-value-that-nobody-sends-anywhere", hosts=[WEB], places=[place])
    limits = EgressLimits(connections=200, attempts_per_s=10_000)
    with node.sandbox(
        image="clients",
        memory_mb=512,
        cpus=2,
        egress=[rule],
        egress_limits=limits,
        secrets=[NAME] if holds_secret else [],
        ttl_s=3600,
    ) as made:
        yield made


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@pytest.mark.req("NET-5")
@pytest.mark.timeout(1800)
def test_no_changed_request_becomes_one_that_was_not_judged(
    node: RealNode, earth: World, seed: int, long_run: bool, holds_secret: bool
) -> None:
    """What a server with another parser sees: only what the policy allows, and nothing that has no record."""
    chance = random.Random(f"{seed} {holds_secret}")
    rule = EgressRule(host=WEB, methods=["GET", "POST"], paths=["/ok", "/ok/**"])
    earth.forget()
    answers: Counter[str] = Counter()
    with sandbox(node, rule, holds_secret=holds_secret) as box:
        for _ in range((2500 if long_run else 250) // BATCH):
            result = box.run(
                ["python3", "-c", SAY, WEB],
                stdin=json.dumps([_said(chance) for _ in range(BATCH)]),
                timeout_s=300,
                check=True,
            )
            answers.update(json.loads(result.stdout))
        (pid,) = processes(node)
        records = _all_records(box)
    seen = [each for each in earth.requests() if each["kind"] in ("request", "cut")]
    print(f"{answers.total()} sent, {len(seen)} arrived, {len(records)} records; {answers.most_common(12)}")
    print(f"interceptor: {peak_bytes(pid) / 1e6:.0f} MB at the most")
    assert answers.total() // 50 < len(seen), "almost nothing arrived: that proves nothing"
    for each in seen:
        assert each["method"] in ("GET", "POST"), each
        assert each["path"] == "/ok" or each["path"].startswith("/ok/"), each
        names = [name for name, _ in each["headers"]]
        assert [value for name, value in each["headers"] if name == "host"] in ([WEB], [f"{WEB}:80"]), each
        assert not {"content-length", "transfer-encoding"} <= set(names), each
    allowed = Counter((record.method, record.path) for record in records if record.verdict == "allowed")
    plain = Counter((each["method"], each["path"]) for each in seen if _is_plain(each["path"]))
    assert len(seen) <= allowed.total()
    assert not plain - allowed, "requests without a record"
    assert [record for record in records if record.verdict == "alert"] == []
    assert peak_bytes(pid) <= MEMORY_BYTES_MAX
    assert "Traceback" not in node.log()


def _said(chance: random.Random) -> tuple[str, tuple[str, int], str]:
    kind = chance.choice(["tls", "tls", "proxy", "name"])
    if kind == "proxy":
        return kind, PROXY, mutated(chance, WEB, before=f"http://{WEB}", path="/ok/p").hex()
    return kind, (WEB, 443 if kind == "tls" else 80), mutated(chance, WEB, path="/ok/p").hex()


def _is_plain(path: str) -> bool:
    return path.isascii() and path.isprintable() and "%" not in path


def _all_records(box: Sandbox) -> list[EgressRecord]:
    found: list[EgressRecord] = []
    while more := box.egress.records(after=found[-1].seq if found else 0):
        found += more
    return found


@pytest.mark.req("NET-5")
@pytest.mark.req("NET-9")
@pytest.mark.timeout(1800)
def test_much_goes_through_and_is_not_kept(node: RealNode, earth: World, long_run: bool, holds_secret: bool) -> None:
    """HTTP/2, up and down, byte for byte, in bounded memory."""
    size = (1 << 30) if long_run else (64 << 20)
    digest = hashlib.sha256()
    for _ in range(size // len(BLOCK)):
        digest.update(BLOCK)
    with sandbox(node, EgressRule(host=WEB, intercept=True), holds_secret=holds_secret) as box:
        earth.forget()
        curl = "curl -sS --http2 -w '%{stderr}%{http_version} %{http_code}'"
        up = box.run(f"python3 -c '{UPLOAD}' {size} | {curl} -o /dev/null -T - https://{WEB}/echo", timeout_s=800)
        assert (up.exit_code, up.stderr) == (0, "2 200"), up
        (request,) = earth.requests()
        assert (request["size"], request["sha256"]) == (size, digest.hexdigest())
        down = box.run(f"{curl} https://{WEB}/bytes/{size} | sha256sum", timeout_s=800)
        assert (down.stdout.split()[0], down.stderr) == (digest.hexdigest(), "2 200"), down
        (pid,) = processes(node)
        print(f"{size >> 20} MiB up and down: interceptor {peak_bytes(pid) / 1e6:.0f} MB at the most")
        assert peak_bytes(pid) <= MEMORY_BYTES_MAX


@pytest.mark.req("NET-5")
@pytest.mark.req("NET-9")
@pytest.mark.timeout(300)
def test_clients_that_never_open_their_window_cost_no_memory(
    node: RealNode, earth: World, long_run: bool, holds_secret: bool
) -> None:
    """Each gets the first 65,535 bytes that HTTP/2 gives without being asked. 128 is what a sandbox may have open."""
    clients = 128 if long_run else 20
    with sandbox(node, EgressRule(host=WEB, intercept=True), holds_secret=holds_secret) as box:
        before = node.daemon_rss_bytes()
        result = box.run(["python3", "-c", NEVER, WEB, str(1 << 30), str(clients)], timeout_s=120)
        assert [int(got) for got in result.stdout.split()] == [65_535] * clients, result
        (pid,) = processes(node)
        print(f"{clients} clients that take nothing: interceptor {peak_bytes(pid) / 1e6:.0f} MB at the most")
        assert peak_bytes(pid) <= (CROWDED_BYTES_MAX if long_run else MEMORY_BYTES_MAX)
        assert node.daemon_rss_bytes() - before < 50_000_000
