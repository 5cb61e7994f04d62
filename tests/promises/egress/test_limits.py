"""What one sandbox may use of the way out: bytes a second, attempts a second, connections, bytes in all. Held to ±10 %."""

from __future__ import annotations

import json

import pytest

from cloche.client import Sandbox
from cloche.wire.egress import EgressLimits
from tests.promises.egress.inside import connect, talk
from tests.promises.egress.worlds import WEB, needs_world
from tests.promises.nodes import RealNode

pytestmark = [needs_world, pytest.mark.timeout(180)]

MB = 1_000_000

DOWN = """
import sys, time, urllib.request as u
with u.urlopen(sys.argv[1]) as answer:
    answer.read(int(sys.argv[2]))   # what a bucket holds at the start is not a rate
    began, size = time.monotonic(), 0
    while data := answer.read(65536): size += len(data)
    print(size / (time.monotonic() - began))
"""
UP = """
import http.client, os, sys, time
c = http.client.HTTPConnection("127.127.0.2", 3128)
total = left = int(sys.argv[2])
began = time.monotonic()
c.putrequest("POST", sys.argv[1]); c.putheader("Content-Length", str(total)); c.endheaders()
while left > 0:
    c.send(bytes(min(65536, left))); left -= 65536
answer = c.getresponse()
assert answer.status == 200, (answer.status, answer.read())
print(total / (time.monotonic() - began))
"""
TRY = """
import json, socket, sys, time
codes, end = [], time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    with socket.create_connection(("127.127.0.2", 3128)) as s:
        s.sendall(b"CONNECT nothing.test:443 HTTP/1.1\\r\\nHost: nothing.test:443\\r\\n\\r\\n")
        codes.append(s.recv(4096).split(b"X-Cloche-Denied: ")[1].split(b"\\r\\n")[0].decode())
print(json.dumps(codes))
"""
HOLD = """
import json, socket, sys
held, said = [], []
for n in range(int(sys.argv[1])):
    s = socket.create_connection(("127.127.0.2", 3128))
    s.sendall(b"CONNECT web.test:443 HTTP/1.1\\r\\nHost: web.test:443\\r\\n\\r\\n")
    said.append(s.recv(4096).split(b" ")[1].decode())
    held.append(s)
print(json.dumps(said))
"""


def rate(box: Sandbox, script: str, *arguments: object) -> float:
    result = box.run(["python3", "-c", script, *map(str, arguments)], timeout_s=60, check=True)
    return float(result.stdout)


@pytest.mark.req("NET-8")
@pytest.mark.alone
@pytest.mark.parametrize("direction", ["down", "up"])
def test_bytes_a_second(node: RealNode, direction: str, long_run: bool) -> None:
    per_s = 2 * MB
    seconds = 10 if long_run else 4
    total, first = per_s * (seconds + 2), per_s * 2
    with node.sandbox(egress=[WEB], egress_limits=EgressLimits(bytes_per_s=per_s)) as box:
        if direction == "down":
            found = rate(box, DOWN, f"http://{WEB}/bytes/{total}", first)
        else:
            found = rate(box, UP, f"http://{WEB}/echo", total)
        assert 0.9 * per_s <= found <= 1.1 * per_s, found / per_s


@pytest.mark.req("NET-8")
@pytest.mark.alone
def test_attempts_a_second(node: RealNode, long_run: bool) -> None:
    """Refused ones count too: what is beyond the rate is not even judged, and is recorded with its count."""
    per_s, seconds = 40.0, (10 if long_run else 4)
    with node.sandbox(egress=[WEB], egress_limits=EgressLimits(attempts_per_s=per_s)) as box:
        codes = json.loads(box.run(["python3", "-c", TRY, str(seconds)], timeout_s=60, check=True).stdout)
        judged = codes.count("no_rule")
        assert codes.count("rate_limited") == len(codes) - judged > 0
        burst = codes.index("rate_limited")
        assert 0.9 * per_s * seconds <= judged - burst <= 1.1 * per_s * seconds, (judged, burst)
        recorded = [record for record in box.egress.records() if record.code == "rate_limited"]
        assert 1 <= len(recorded) <= seconds + 2


@pytest.mark.req("NET-8")
def test_connections_at_one_time_and_bytes_in_all(node: RealNode) -> None:
    with node.sandbox(egress=[WEB], egress_limits=EgressLimits(connections=5, bytes_total=MB)) as box:
        said = json.loads(box.run(["python3", "-c", HOLD, "8"], timeout_s=30, check=True).stdout)
        assert said == ["200"] * 5 + ["429"] * 3
        cut = box.run(["python3", "-c", DOWN, f"http://{WEB}/bytes/{3 * MB}", "1"], timeout_s=30)
        assert "ConnectionResetError" in cut.stderr
        (after,) = talk(box, connect(WEB))
        assert (after.status, after.code) == (429, "bytes_used_up")
        (record,) = [record for record in box.egress.records() if record.verdict == "denied" and record.port == 443][
            -1:
        ]
        assert (record.code, "bytes" in record.text) == ("bytes_used_up", True)


@pytest.mark.req("NET-6")
def test_bytes_and_time_are_recorded(node: RealNode) -> None:
    """Both directions, as the gate moved them; the command that asked; one connection's records belong together."""
    with node.sandbox(egress=[WEB]) as box:
        result = box.run(["python3", "-c", DOWN, f"http://{WEB}/bytes/{3 * MB}", "1"], timeout_s=30, check=True)
        begun, over = box.egress.records()
        assert (begun.verdict, over.verdict) == ("allowed", "closed")
        assert begun.connection == over.connection
        assert {begun.command, over.command} == {result.command_id}
        assert 3 * MB <= (over.bytes_down or 0) <= 3 * MB + 2000
        assert 50 <= (over.bytes_up or 0) <= 1000
        assert over.duration_s is not None
        assert (begun.host, begun.port, begun.method, begun.path) == (WEB, 80, "GET", f"/bytes/{3 * MB}")
        assert begun.address
        assert begun.rule == "egress[0]"
        assert begun.policy == box.info().egress.policy
