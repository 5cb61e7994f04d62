"""The thinnest true line of the way out: a program inside, the agent, the gate, a server; or a refusal that all can read."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.promises.nodes import RealNode, real_node, wait_until

FETCH = """
import sys, urllib.request, urllib.error
try:
    with urllib.request.urlopen(sys.argv[1], timeout=20) as answer:
        print(answer.status, answer.read().decode())
except urllib.error.HTTPError as refused:
    print(refused.code, refused.reason, refused.headers["X-Cloche-Denied"])
    print(refused.read().decode())
except OSError as bad:
    print("failed", bad)
"""
PLAIN = """
import socket, sys
host, port = sys.argv[1], int(sys.argv[2])
with socket.create_connection((host, port), timeout=20) as s:
    s.sendall(b"GET /plain HTTP/1.0\\r\\nHost: %s:%d\\r\\n\\r\\n" % (host.encode(), port))
    print(s.makefile("rb").read().decode().splitlines()[-1])
"""


class _Greeting(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"hello from {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def web() -> Iterator[int]:
    """A real server on loopback; its port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Greeting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with web() as number:
        yield number


def policy(port: int) -> str:
    """The organisation says that two names are this machine, and excepts one exact address and port."""
    return (
        "version: 1\n"
        "hosts: {web.example: 127.0.0.1, other.example: 127.0.0.1, metadata.example: 169.254.169.254}\n"
        f'addresses: ["127.0.0.1:{port}"]\n'
    )


@pytest.fixture(scope="module")
def node(port: int) -> Iterator[RealNode]:
    with real_node(policy=policy(port)) as made:
        yield made


def rule(port: int, host: str = "web.example") -> dict[str, object]:
    return {"host": host, "ports": [port], "protocol": "web"}


@pytest.mark.req("NET-1")
@pytest.mark.req("NET-6")
def test_an_allowed_host_answers_and_the_attempt_is_recorded(node: RealNode, port: int) -> None:
    with node.sandbox(egress=[rule(port)]) as box:
        result = box.run(["python3", "-c", FETCH, f"http://web.example:{port}/a"])
        assert result.stdout == "200 hello from /a\n", (result.stdout, result.stderr)
        assert result.denials == []
        wait_until(lambda: [r.verdict for r in box.egress.records()][-1:] == ["closed"], what="the closed record")
        allowed, closed = box.egress.records()
        assert (allowed.verdict, allowed.code, allowed.rule) == ("allowed", "allowed", "egress[0]")
        assert (allowed.host, allowed.port, allowed.address) == ("web.example", port, "127.0.0.1")
        assert allowed.command == result.command_id
        assert allowed.policy == box.info().egress.policy
        assert closed.connection == allowed.connection
        assert closed.bytes_down
        assert closed.bytes_down > len("hello from /a")


@pytest.mark.req("NET-2")
@pytest.mark.req("NET-7")
def test_what_no_rule_allows_is_refused_in_words(node: RealNode, port: int) -> None:
    with node.sandbox() as box:
        result = box.run(["python3", "-c", FETCH, f"http://web.example:{port}/a"])
        assert result.stdout.startswith("403 "), (result.stdout, result.stderr)
        assert "no_rule" in result.stdout
        assert f"web.example:{port}" in result.stdout
        (denial,) = result.denials
        assert (denial.verdict, denial.code, denial.rule) == ("denied", "no_rule", "default")
        assert (denial.host, denial.port, denial.command) == ("web.example", port, result.command_id)


@pytest.mark.req("NET-7")
def test_the_person_at_the_end_of_a_run_reads_it_too(node: RealNode, port: int) -> None:
    done = node.cloche("run", "--", "python3", "-c", FETCH, "http://pastebin.example/")
    assert done.returncode == 0
    said = done.stderr.decode()
    assert "1 connection was not allowed" in said
    assert "pastebin.example:80" in said
    assert "allow it: --allow pastebin.example" in said


@pytest.mark.req("NET-10")
def test_a_program_that_knows_no_proxy_gets_there_too(node: RealNode, port: int) -> None:
    with node.sandbox(egress=[rule(port)]) as box:
        result = box.run(["python3", "-c", PLAIN, "web.example", str(port)], env={"http_proxy": "", "HTTP_PROXY": ""})
        assert result.stdout == "hello from /plain\n", result.stderr
        other = box.run(["python3", "-c", PLAIN, "other.example", str(port)])
        assert "Name or service not known" in other.stderr or "Temporary failure" in other.stderr, other.stderr


@pytest.mark.req("NET-4")
def test_an_address_that_nobody_excepts_is_refused_though_a_rule_allows_the_name(node: RealNode) -> None:
    with node.sandbox(egress=["metadata.example"]) as box:
        result = box.run(["python3", "-c", FETCH, "http://metadata.example/latest/meta-data/"])
        assert result.stdout.startswith("403 "), result.stdout
        (denial,) = result.denials
        assert denial.code == "address_refused"


@pytest.mark.req("NET-3")
def test_a_grant_lets_out_for_a_while_and_can_be_taken_back(node: RealNode, port: int) -> None:
    with node.sandbox() as box:
        fetch = ["python3", "-c", FETCH, f"http://web.example:{port}/g"]
        assert box.run(fetch).stdout.startswith("403 ")
        granted = node.cloche("egress", "allow", box.id, f"web.example:{port}", "--for", "10m")
        assert granted.returncode == 0, granted.stderr
        name = granted.stdout.decode().strip()
        assert [each.id for each in box.egress.grants()] == [name]
        assert box.run(fetch).stdout == "200 hello from /g\n"
        assert box.egress.records()[-2].rule.startswith(f"grant/{name}")
        box.egress.revoke(name)
        assert box.run(fetch).stdout.startswith("403 ")


@pytest.mark.req("NET-3")
def test_commands_beside_each_other_are_told_apart(node: RealNode, port: int) -> None:
    with node.sandbox() as box:
        jobs = [
            box.commands.start(["python3", "-c", f"import time; time.sleep(1)\n{FETCH}", f"http://h{n}.example/"])
            for n in range(3)
        ]
        for number, job in enumerate(jobs):
            denials = job.result().denials
            assert [(each.host, each.command) for each in denials] == [(f"h{number}.example", job.id)]


@pytest.mark.req("NET-9")
def test_the_policy_and_its_grants_outlive_the_daemon(port: int) -> None:
    with real_node(policy=policy(port)) as node:
        with node.client() as client:
            from cloche.client import Sandbox

            box = Sandbox.create(node=client, egress=[rule(port)])
            fetch = ["python3", "-c", FETCH, f"http://web.example:{port}/x"]
            other = ["python3", "-c", FETCH, f"http://other.example:{port}/x"]
            assert box.run(fetch).stdout == "200 hello from /x\n"
            box.egress.allow(f"other.example:{port}", for_s=600)
            before = box.info().egress
            node.restart_daemon()
            assert box.info().egress == before
            assert box.run(fetch).stdout == "200 hello from /x\n"
            assert box.run(other).stdout == "200 hello from /x\n"
            assert box.run(["python3", "-c", FETCH, "http://third.example/"]).stdout.startswith("403 ")
            numbers = [each.seq for each in box.egress.records()]
            assert numbers == list(range(1, len(numbers) + 1))
            box.kill()
            assert box.egress.records()[-1].host == "third.example"


@pytest.mark.req("NET-6")
def test_records_are_followed_as_they_come(node: RealNode) -> None:
    with node.sandbox() as box:
        box.run(["python3", "-c", FETCH, "http://one.example/"])
        follow = iter(box.egress.follow())
        assert next(follow).host == "one.example"
        box.run(["python3", "-c", FETCH, "http://two.example/"])
        assert next(follow).host == "two.example"
        box.kill()
        assert list(follow) == []
        listed = node.cloche("egress", box.id, "--json").stdout.splitlines()
        assert [json.loads(each)["host"] for each in listed] == ["one.example", "two.example"]


@pytest.mark.req("POL-1")
@pytest.mark.req("NET-3")
def test_the_organisations_file_beats_a_request_and_is_read_again(port: int) -> None:
    with real_node(
        policy=policy(port) + "deny: [other.example]\noffer: [web.example, 'other.example', 'third.example']\n"
    ) as node:
        refused = node.cloche("run", "--allow", "elsewhere.example", "--", "true")
        assert refused.returncode == 125
        assert b"policy_refused" in refused.stderr
        with node.sandbox(egress=["other.example"]) as box:
            result = box.run(["python3", "-c", FETCH, "http://other.example/"])
            (denial,) = result.denials
            assert (denial.code, denial.rule) == ("denied_by_rule", "deny[0]")
            before = box.info().egress.policy
            node.write_policy(policy(port) + f"allow: [{{host: web.example, ports: [{port}], protocol: web}}]\n")
            with node.sandbox() as later:
                assert later.run(["python3", "-c", FETCH, f"http://web.example:{port}/n"]).stdout.startswith("200 ")
                assert later.egress.records()[0].rule == "allow[0]"
            assert box.info().egress.policy == before, "what runs keeps what it was made with"
            assert box.run(["python3", "-c", FETCH, "http://other.example/"]).denials[0].rule == "deny[0]"
        node.write_policy("version: 1\nnonsense: true\n")
        bad = node.cloche("create")
        assert b"policy_invalid" in bad.stderr
        assert b"policy.yaml:2" in bad.stderr


@pytest.mark.req("SEC-1")
def test_a_crash_of_the_daemon_writes_no_memory_to_a_disk(node: RealNode) -> None:
    limits = Path(f"/proc/{node.pid}/limits").read_text().splitlines()
    (core,) = [line.split() for line in limits if line.startswith("Max core file size")]
    assert core[4:6] == ["0", "0"]
