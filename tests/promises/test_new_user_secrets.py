"""A user's own node, without root, looks into TLS and puts a secret in: on the clean Debian, by its command line alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cloche_server.egress.interception import interpreter
from cloche_server.egress.interception.environment import name_of
from tests.promises.chroots import FIRST_SUBID, IS_CGROUP_V2, SUBIDS
from tests.promises.clean_machines import CleanMachine
from tests.promises.egress.authority import TestAuthority
from tests.promises.egress.interceptor_node import shared_environment
from tests.promises.nodes import wait_until
from tests.promises.test_new_user import ALICE, fix_of

PYTHON = interpreter.find()
WEB, VALUE = "web.test", "real-value-of-the-service-key"
HOME = "/home/alice"
STATE = f"{HOME}/.local/state/cloche"

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(PYTHON is None, reason="no Python that the interceptor can run with"),
    pytest.mark.skipif(IS_CGROUP_V2, reason="version 2 is delegated by systemd, which this chroot has not"),
]

SERVER = """
import http.server, json, ssl
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with open("/srv/seen.jsonl", "a") as log:
            log.write(json.dumps([self.path, self.headers.get("Authorization")]) + "\\n")
        body = ("you sent " + str(self.headers.get("Authorization"))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 443), Answers)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/srv/web.pem", "/srv/web.key")
server.socket = context.wrap_socket(server.socket, server_side=True)
open("/srv/ready", "w").close()
server.serve_forever()
"""
POLICY = f"""version: 1
hosts:
  {WEB}: 127.0.0.1
addresses:
  - "127.0.0.1"
ca_file: /srv/ca.pem
intercept: always
"""
ASK = (
    "import os, urllib.request, sys; "
    "request = urllib.request.Request(sys.argv[1], headers={'Authorization': 'Bearer ' + os.environ['SERVICE_KEY']}); "
    "print(urllib.request.urlopen(request).read().decode())"
)


@contextmanager
def server_inside(machine: CleanMachine) -> Iterator[None]:
    """The world of this machine: one TLS server on its loopback."""
    scratch = Path(tempfile.mkdtemp(prefix="cloche-authority-"))
    try:
        authority = TestAuthority(scratch)
        files = [authority.file, *authority.issue("web", WEB)]
        (scratch / "server.py").write_text(SERVER)
        for file in [*files, scratch / "server.py"]:
            machine.give(file, f"/srv/{file.name}")
    finally:
        shutil.rmtree(scratch)
    enter = ["nsenter", "--target", str(machine.first_pid), "--net"]
    subprocess.run([*enter, "ip", "link", "set", "lo", "up"], check=True)
    argv = ["nsenter", "--target", str(machine.first_pid), "--mount", "--net", "--", "python3", "-I", "/srv/server.py"]
    server = subprocess.Popen(argv)
    try:
        wait_until((machine.tree / "srv/ready").exists, what="the server")
        yield
    finally:
        server.kill()
        server.wait()
        subprocess.run([*enter, "ip", "link", "set", "lo", "down"], check=True)
        for name in ("ca.pem", "web.pem", "web.key", "server.py", "ready", "seen.jsonl"):
            (machine.tree / "srv" / name).unlink(missing_ok=True)


def _give_python(machine: CleanMachine) -> None:
    """As an operator would have installed it, without what a program that runs needs not."""
    assert PYTHON is not None
    left_out = shutil.ignore_patterns("test", "__pycache__", "site-packages", "config-*", "idlelib", "*.a")
    target = machine.tree / "opt/python"
    library = f"lib/python{PYTHON.version}"
    shutil.copytree(PYTHON.prefix / library, target / library, ignore=left_out, symlinks=True)
    for shared in (PYTHON.prefix / "lib").glob("libpython*.so*"):
        shutil.copy(shared, target / "lib", follow_symlinks=False)
    (target / "bin").mkdir()
    shutil.copy(PYTHON.executable, target / "bin")
    machine.does("chmod -R o+rX /opt/python")


def _give_environment(machine: CleanMachine) -> None:
    """The interceptor's packages, as if the node had made them: this machine has no network to fetch them from."""
    assert PYTHON is not None
    place = f"{STATE}/interceptor/{name_of(PYTHON.version)}"
    machine.does(f"mkdir -p {STATE}/interceptor", user="alice")
    shutil.copytree(shared_environment(), machine.tree / place.lstrip("/"), symlinks=True)
    machine.does(f"chown -R alice: {STATE}/interceptor")


@pytest.mark.req("FLT-1")
@pytest.mark.req("SEC-1")
@pytest.mark.req("NET-9")
def test_a_user_without_root_has_secrets_and_interception(clean_machine: CleanMachine) -> None:
    machine, alice, before = clean_machine, clean_machine.alice, clean_machine.left()
    alice("cloche doctor")
    before |= machine.left()  # the engine's link inside the installation
    _give_python(machine)
    _give_environment(machine)
    machine.does(f"mkdir -p {HOME}/.config/cloche", user="alice")
    (machine.tree / f"{HOME}/.config/cloche/policy.yaml".lstrip("/")).write_text(POLICY)
    assert PYTHON is not None
    named = f"export CLOCHE_INTERCEPTOR_PYTHON=/opt/python/bin/python{PYTHON.version}; "
    delegated = fix_of(alice("cloche run -- true")[1])
    assert alice(delegated)[0] == 0
    try:
        with server_inside(machine):
            _uses_a_secret(machine, named)
            (uid,) = (uid for uid, line in machine.processes() if "runpy" in line)
            assert FIRST_SUBID <= uid < FIRST_SUBID + SUBIDS, "the interceptor has an id of its own"
            assert all(uid == ALICE or uid >= FIRST_SUBID for uid, _ in machine.processes()), "nothing privileged runs"
    finally:
        alice("cloche reset --all --yes")
        alice(delegated.replace("delegate", "delegate --remove"))
        machine.does(f"rm -rf /opt/python {HOME}/.config {STATE}")
    assert machine.processes() == []
    assert machine.left() == before


def _uses_a_secret(machine: CleanMachine, named: str) -> None:
    place = f"--host {WEB} --header 'Authorization: Bearer {{}}'"
    code, text = machine.alice(f"{named}SERVICE_KEY={VALUE} cloche secret set SERVICE_KEY --from env {place}")
    assert (code, text.splitlines()[-1]) == (0, f"✓ secret SERVICE_KEY is bound to {WEB}"), text
    run = f"cloche run --allow {WEB} --secret SERVICE_KEY -- python3 -c"
    code, text = machine.alice(f'{run} "{ASK}" https://{WEB}/used')
    assert (code, text.startswith("you sent Bearer cloche_ph_"), VALUE in text) == (0, True, False), text
    seen = [json.loads(line) for line in (machine.tree / "srv/seen.jsonl").read_text().splitlines()]
    assert seen == [["/used", f"Bearer {VALUE}"]]
    code, text = machine.alice(f"{run} 'print(open(\"/proc/self/environ\").read())' ")
    assert (code, VALUE in text) == (0, False), text
    elsewhere = f"import os, urllib.request; urllib.request.urlopen('https://{WEB}/' + os.environ['SERVICE_KEY'])"
    code, text = machine.alice(f'{run} "{elsewhere}"')
    assert (code, "the placeholder of SERVICE_KEY stood in the path" in text) == (1, True), text
    assert len((machine.tree / "srv/seen.jsonl").read_text().splitlines()) == 1
