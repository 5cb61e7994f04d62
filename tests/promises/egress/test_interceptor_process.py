"""The interceptor's process itself: started by the real launcher and keeper, looked at from the host's /proc and by strace."""

from __future__ import annotations

import http.server
import os
import re
import signal
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cloche_server.egress.interception import authority, interpreter
from tests.promises.egress.interceptor_node import LINEAGE, SANDBOX, InterceptorNode, interceptor_node, only, over
from tests.promises.nodes import wait_until

pytestmark = [
    pytest.mark.req("NET-9"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(interpreter.find() is None, reason="no Python that the interceptor can run with"),
]
NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")
CAPABILITY_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
MIB = 1 << 20


def status(pid: int | str) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


class Upstream:
    """A TLS server on loopback whose certificate is an authority's of the test."""

    def __init__(self, directory: Path, host: str) -> None:
        self.root = authority.make("l" + "9" * 19)
        pem = directory / "upstream.pem"
        pem.write_bytes(_leaf(self.root, host))
        self.requests: list[tuple[str, dict[str, str]]] = []
        outer = self

        class Answers(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.requests.append((self.path, dict(self.headers)))
                body = f"answer to {self.path}".encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
            daemon_threads = True

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        self.server = Server(("127.0.0.1", 0), Answers)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def _leaf(root: authority.Authority, host: str) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.load_pem_x509_certificate(root.certificate)
    signer = serialization.load_pem_private_key(root.key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.DNSName(host), x509.IPAddress(ip_address("127.0.0.1"))])
    identifier = issuer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(signer, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + made.public_bytes(serialization.Encoding.PEM)


HOST = "api.example.test"


class Real:
    def __init__(self, node: InterceptorNode, upstream: Upstream) -> None:
        self.node = node
        self.upstream = upstream
        self.trust = node.ask("prepare", sandbox=SANDBOX, lineage=LINEAGE)["pem"]

    @contextmanager
    def client(self, *, allow: bool = True, sandbox: str = SANDBOX) -> Iterator[tuple[int, ssl.SSLSocket]]:
        fields = {"host": HOST, "tls": True, "allow": allow, "upstream": self.upstream.port}
        conn = self.node.ask("open", sandbox=sandbox, lineage=LINEAGE, **fields)
        port = self.node.ask("listen", conn=conn)
        context = ssl.create_default_context(cadata=self.trust)
        with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
            with context.wrap_socket(raw, server_hostname=HOST) as client:
                yield conn, client

    def get(self, path: str, *, allow: bool = True, **headers: str) -> str:
        with self.client(allow=allow) as (_, client):
            return asked(client, path, **headers)


def asked(client: ssl.SSLSocket, path: str, **headers: str) -> str:
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n{more}Connection: close\r\n\r\n".encode())
    text = b""
    while piece := client.recv(1 << 16):
        text += piece
    return text.decode("latin-1")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    upstream = Upstream(tmp_path_factory.mktemp("upstream"), HOST)
    with interceptor_node(roots=upstream.root.certificate) as made:
        yield Real(made, upstream)


def test_a_request_goes_through_it(real: Real) -> None:
    answer = real.get("/v1/things?q=1")
    assert answer.startswith("HTTP/1.1 200")
    assert answer.endswith("answer to /v1/things?q=1")


def test_what_the_gate_refuses_never_gets_out(real: Real) -> None:
    before = len(real.upstream.requests)
    answer = real.get("/refused", allow=False)
    assert " 403 " in answer.partition("\r\n")[0]
    assert "path_not_allowed" in answer
    assert len(real.upstream.requests) == before


@pytest.mark.req("SEC-1")
def test_a_placeholder_becomes_the_value_there(real: Real) -> None:
    secrets = {"TOKEN": "real-value-of-the-token"}
    [placeholder] = real.node.ask("secrets", sandbox=SANDBOX, lineage=LINEAGE, secrets=secrets, hosts=[HOST])
    assert real.get("/with", Authorization=f"Bearer {placeholder}").startswith("HTTP/1.1 200")
    path, headers = real.upstream.requests[-1]
    assert (path, headers["Authorization"]) == ("/with", "Bearer real-value-of-the-token")
    assert "real-value" not in (real.node.paths.state / "logs" / "daemon.log").read_text()


@pytest.mark.req("ISO-4")
def test_another_uid_no_capability_and_nothing_of_ours(real: Real) -> None:
    real.get("/")
    found = only(real.node)
    now = status(found["pid"])
    assert {int(number) for name in ("Uid", "Gid") for number in now[name]} == {found["uid"]}
    others = {int(status(pid)["Uid"][0]) for pid in (real.node.pid, real.node.ask("facts")["pid"], os.getpid())}
    assert not others & {found["uid"]}
    assert now["Groups"] == []
    assert {int(now[name][0], 16) for name in CAPABILITY_SETS} == {0}
    assert now["NoNewPrivs"] == ["1"]
    for kind in NAMESPACES:
        theirs = os.readlink(f"/proc/{found['pid']}/ns/{kind}")
        for other in ("self", real.node.pid, real.node.ask("facts")["pid"]):
            assert theirs != os.readlink(f"/proc/{other}/ns/{kind}"), kind
    assert Path(f"/proc/{found['pid']}/net/dev").read_text().count(":") == 1
    assert Path(f"/proc/{found['pid']}/net/route").read_text().count("\n") <= 1, "a route"
    assert os.stat(f"/proc/{found['pid']}/mem").st_uid == found["uid"] - 1, "dumpable: it could be read by its own id"


@pytest.mark.req("ISO-4")
def test_a_cgroup_of_its_own_with_limits(real: Real) -> None:
    real.get("/")
    found = only(real.node)
    lines = Path(f"/proc/{found['pid']}/cgroup").read_text().splitlines()
    mine = [line for line in lines if re.search(r":(memory|pids|):", line) and line != "0::/"]
    assert mine
    assert all(line.endswith(f"/{found['id']}") for line in mine)
    directories = real.node.ask("facts")["cgroups"]["dirs"]
    version = real.node.ask("facts")["cgroups"]["version"]

    def limit(controller: str, file: str) -> str:
        base = directories[controller] if version == 1 else directories["unified"]
        return Path(base, str(found["id"]), file).read_text().strip()

    assert int(limit("memory", "memory.limit_in_bytes" if version == 1 else "memory.max")) == 256 * MIB
    assert int(limit("pids", "pids.max")) == 16
    limits = Path(f"/proc/{found['pid']}/limits").read_text()
    assert re.search(r"Max file size +0 +0", limits)
    assert re.search(r"Max core file size +0 +0", limits)
    threads = int(status(found["pid"])["Threads"][0])
    assert threads < 16
    mounts = Path(f"/proc/{found['pid']}/mounts").read_text().splitlines()
    assert [line for line in mounts if not re.match(r"ro(,|$)", line.split()[3])] == []


def test_it_opens_no_socket_of_its_own(real: Real) -> None:
    """By the kernel's word: what it asks for while a request goes through."""
    real.get("/")
    pid = only(real.node)["pid"]
    trace = real.node.paths.run / "trace"
    watcher = subprocess.Popen(
        ["strace", "-f", "-qq", "-e", "trace=socket,connect,bind,open,openat,execve,fork,vfork,ptrace", "-o", str(trace), "-p", str(pid)],
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        wait_until(lambda: status(pid)["TracerPid"] != ["0"], what="strace")
        for number in range(3):
            assert real.get(f"/traced/{number}").endswith(f"answer to /traced/{number}")
    finally:
        watcher.terminate()
        watcher.wait()
    calls = trace.read_text()
    assert not re.search(r"\b(socket|connect|bind|execve|fork|vfork|ptrace)\(", calls), calls
    assert not re.search(r"O_(WRONLY|RDWR|CREAT)", calls), calls


def test_killed_it_closes_everything_at_once_and_the_next_works(real: Real, long_run: bool) -> None:
    for number in range(20 if long_run else 3):
        with real.client() as (conn, client):
            client.sendall(f"GET /before HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            assert client.recv(15) == b"HTTP/1.1 200 OK"
            pid = only(real.node)["pid"]
            begun = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            try:
                while client.recv(1 << 16):
                    pass
            except (ssl.SSLError, ConnectionError):
                pass
            assert time.monotonic() - begun < 1.0
            wait_until(lambda conn=conn: over(real.node, conn), seconds=1, what="told to the gate")
        assert real.get(f"/after/{number}").endswith(f"answer to /after/{number}")
        assert only(real.node)["pid"] != pid


def test_the_same_authority_after_a_restart(real: Real) -> None:
    real.node.ask("again", idle_s=600.0)
    assert real.node.ask("prepare", sandbox=SANDBOX, lineage=LINEAGE)["pem"] == real.trust
    assert real.get("/restarted").endswith("answer to /restarted")
    kept = real.node.paths.state / "lineages" / LINEAGE
    assert b"PRIVATE" not in kept.read_bytes()


@pytest.mark.long
def test_its_environment_is_made_at_first_need() -> None:
    """With the node's own pip, by the system user. Every other test has it in place."""
    with interceptor_node(environment=False) as node:
        made = node.ask("prepare", sandbox=SANDBOX, lineage=LINEAGE)
        assert made["lines"][-1] == "The interceptor's environment is ready."
        assert any("mitmproxy" in line for line in made["lines"])
        conn = int(node.ask("open", sandbox=SANDBOX, lineage=LINEAGE, host=HOST, tls=True))
        assert not over(node, conn)
        assert status(only(node)["pid"])["NoNewPrivs"] == ["1"]
