"""Real registries on loopback: Debian's `docker-registry`, each with its own directory and port.

`running(directory)` is a plain one; `ca=` gives it TLS, `basic=True` a login, `tokens=` a token server of its own. All
of it ends with the `with` block. A fixture in a test module:

    @pytest.fixture(scope="module")
    def registry(tmp_path_factory):
        with running(tmp_path_factory.mktemp("registry")) as started:
            yield started
"""

import base64
import contextlib
import datetime
import ipaddress
import json
import re
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

PROGRAM = shutil.which("docker-registry") or "/usr/bin/docker-registry"
USER, PASSWORD = "alice", "correct horse"
HASHED = "$2b$04$abcdefghijklmnopqrstuujydOTSfIH/d5oUHpsygqV5X9xJLQc6e"
"""bcrypt of PASSWORD with the least cost; the registry takes no other kind."""
IDENTITY_TOKEN = "identity-of-alice"
START_SECONDS = 20.0


def can_run() -> bool:
    return Path(PROGRAM).exists()


@dataclass(frozen=True)
class Ca:
    """An authority of the test's own."""

    file: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls, directory: Path, name: str = "Test CA") -> "Ca":
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(name, key, None)
        file = directory / f"{name.replace(' ', '-').lower()}.pem"
        file.write_bytes(_pem(certificate))
        return cls(file, key, certificate)

    def issue(self, directory: Path) -> tuple[Path, Path]:
        """Certificate and key of a server on loopback."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate_file, key_file = directory / "server.pem", directory / "server.key"
        certificate_file.write_bytes(_pem(_certificate("server", key, self)))
        key_file.write_bytes(_private_pem(key))
        return certificate_file, key_file


@dataclass
class RunningRegistry:
    """Where it is, and how to be let in."""

    host: str
    url: str
    directory: Path
    ca: Ca | None = None
    basic: bool = False
    tokens: "TokenServer | None" = None

    def tls_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.ca.file) if self.ca else None)

    def push_headers(self, repository: str) -> dict[str, str]:
        if self.tokens is not None:
            return {"authorization": f"Bearer {self.tokens.token(repository, ['pull', 'push'])}"}
        return {"authorization": f"Basic {_login()}"} if self.basic else {}

    def blob_file(self, digest: str) -> Path:
        """Where it keeps a blob: to be damaged by a test."""
        algorithm, _, name = digest.partition(":")
        return self.directory / "data/docker/registry/v2/blobs" / algorithm / name[:2] / name / "data"


@contextlib.contextmanager
def running(
    directory: Path, *, ca: Ca | None = None, basic: bool = False, tokens: "TokenServer | None" = None
) -> Iterator[RunningRegistry]:
    config: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "info", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(directory / "data")}, "delete": {"enabled": True}},
        "http": {"addr": "127.0.0.1:0"},
    }
    if ca is not None:
        certificate, key = ca.issue(directory)
        config["http"]["tls"] = {"certificate": str(certificate), "key": str(key)}
    if basic:
        (directory / "htpasswd").write_text(f"{USER}:{HASHED}\n")
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(directory / "htpasswd")}}
    if tokens is not None:
        config["auth"] = {"token": tokens.settings(directory)}
    (directory / "config.yml").write_text(json.dumps(config))
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [PROGRAM, "serve", str(directory / "config.yml")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"OTEL_TRACES_EXPORTER": "none"},
        )
    try:
        host = f"127.0.0.1:{_port(process, log)}"
        yield RunningRegistry(host, f"{'https' if ca else 'http'}://{host}", directory, ca, basic, tokens)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory / "data", ignore_errors=True)


@dataclass
class TokenServer:
    """Gives signed tokens to who knows the password or the identity token; remembers who asked."""

    url: str
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    certificate: x509.Certificate = field(repr=False)
    seen: list[dict[str, Any]] = field(default_factory=list)
    public: set[str] = field(default_factory=set)
    """Repositories that a stranger may pull."""
    seconds: int = 300
    """How long a token is good."""

    def settings(self, directory: Path) -> dict[str, str]:
        bundle = directory / "tokens.pem"
        bundle.write_bytes(_pem(self.certificate))
        return {"realm": f"{self.url}/token", "service": "test", "issuer": "issuer", "rootcertbundle": str(bundle)}

    def token(self, repository: str, actions: list[str]) -> str:
        now = int(time.time())
        access = [{"type": "repository", "name": repository, "actions": actions}] if actions else []
        chain = [base64.b64encode(self.certificate.public_bytes(serialization.Encoding.DER)).decode()]
        head = {"typ": "JWT", "alg": "ES256", "x5c": chain}
        claims = {"iss": "issuer", "sub": USER, "aud": "test", "iat": now, "nbf": now - 10, "access": access}
        claims |= {"exp": now + self.seconds, "jti": str(time.monotonic_ns())}
        text = ".".join(_url64(json.dumps(part).encode()) for part in (head, claims))
        r, s = utils.decode_dss_signature(self.key.sign(text.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{text}.{_url64(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"

    def answer(self, query: dict[str, str], authorization: str | None) -> tuple[int, dict[str, Any]]:
        self.seen.append({**query, "authorization": authorization})
        known = authorization == f"Basic {_login()}" or query.get("refresh_token") == IDENTITY_TOKEN
        if not known and (authorization or "refresh_token" in query):
            return 401, {"errors": []}
        repository = query.get("scope", "::").split(":")[1]
        may = known or repository in self.public
        return 200, {"token": self.token(repository, ["pull"] if may else []), "expires_in": self.seconds}


@contextlib.contextmanager
def token_server() -> Iterator[TokenServer]:
    key = ec.generate_private_key(ec.SECP256R1())

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(urlsplit(self.path).query)

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["content-length"])).decode())

        def _answer(self, query: str) -> None:
            asked = {name: values[0] for name, values in parse_qs(query).items()}
            status, document = server.answer(asked, self.headers.get("authorization"))
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server = TokenServer(f"http://127.0.0.1:{http.server_address[1]}", key, _certificate("tokens", key, None))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def wait_until(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if match := re.search(pattern, log.read_text(errors="replace")):
            return match[1]
        time.sleep(0.02)
    raise AssertionError(f"docker-registry did not start: {log.read_text(errors='replace')[-2000:]}")


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    port = int(wait_until(process, log, r"listening on 127\.0\.0\.1:(\d+)"))
    httpx2.get(f"http://127.0.0.1:{port}/")  # it listens before it says so; this waits until it answers
    return port


def _certificate(name: str, key: ec.EllipticCurvePrivateKey, issuer: Ca | None) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if issuer is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key())
        builder = builder.add_extension(authority, critical=False)
    return builder.sign(issuer.key if issuer else key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    kind = serialization.PrivateFormat.TraditionalOpenSSL
    return key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())


def _login() -> str:
    return base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


def _url64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
