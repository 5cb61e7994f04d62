"""A small world of real servers on loopback, and the organisation's file by which a node's sandboxes may reach it.

Every part has an address of its own in 127/8, so that all ports are the usual ones (443, 80, 5432, 53) and worlds of several
test runs do not meet. Nothing of it is on a network.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cloche_server.egress.interception import interpreter
from cloche_server.node.launch.places import default_images_dir
from tests.promises.egress import packages
from tests.promises.egress.authority import TestAuthority
from tests.promises.egress.dns import DnsServer, dns_server
from tests.promises.egress.interceptor_node import place_environment
from tests.promises.egress.postgres import postgres
from tests.promises.egress.recorder import Recorder, recorder
from tests.promises.nodes import ROOT, RealNode, wait_until

HERE = Path(__file__).parent
DEBIAN_PYTHON = "/usr/bin/python3"
NEEDED = ("/usr/lib/python3/dist-packages/hypercorn", "/usr/lib/python3/dist-packages/grpc", "/usr/lib/postgresql")
CLIENTS = ROOT / "build" / "clients"
WEB = "web.test"
OTHER = "other.test"
"""The same server under a name that no rule of most tests allows."""
DATABASE = "db.test"
GRPC = "grpc.test"
EVIL = "evil.test"
"""Nobody's: its address is a recorder."""

needs_world = pytest.mark.skipif(
    os.getuid() != 0 or not all(Path(path).exists() for path in NEEDED),
    reason="needs root for ports below 1024, and python3-hypercorn, python3-grpcio, postgresql (just setup)",
)
needs_clients = pytest.mark.skipif(
    not (CLIENTS / "clients.json").exists(), reason="needs build/clients (tools/build_rootfs.sh clients)"
)


class World:
    """What runs, where, and what reached it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.authority = TestAuthority(directory)
        block = f"127.{random.SystemRandom().randrange(65, 126)}.{random.SystemRandom().randrange(256)}"
        self.web, self.database, self.grpc, self.evil_address, self.dns_address = (f"{block}.{n}" for n in range(1, 6))
        self.hosts = {WEB: self.web, OTHER: self.web, DATABASE: self.database, GRPC: self.grpc}
        self.files = directory / "files"
        self.files.mkdir()
        self.log = directory / "web.jsonl"
        self.log.touch()
        self.dns: DnsServer
        self.evil: Recorder

    @property
    def ca(self) -> bytes:
        return self.authority.pem

    def policy(self, text: str = "", *, hosts: dict[str, str] | None = None, excepted: bool = True) -> str:
        """The organisation's file: these names are these addresses, and the world's addresses may be reached."""
        names = {**self.hosts, **(hosts or {})}
        mapped = "".join(f"  {name}: {address}\n" for name, address in names.items())
        addresses = [self.web, self.database, self.grpc] if excepted else []
        listed = "".join(f'  - "{address}"\n' for address in addresses)
        exceptions = f"addresses:\n{listed}" if listed else ""
        return (
            f"version: 1\nhosts:\n{mapped}{exceptions}"
            f'nameservers: ["{self.dns_address}:53"]\nca_file: {self.authority.file}\n{text}'
        )

    def requests(self, **wanted: object) -> list[dict[str, Any]]:
        """What reached the web, oldest first, whose fields are these."""
        found = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [each for each in found if all(each.get(name) == value for name, value in wanted.items())]

    def forget(self) -> None:
        """Only what comes from now on is asked for."""
        os.truncate(self.log, 0)


@contextmanager
def world() -> Iterator[World]:
    directory = Path(tempfile.mkdtemp(prefix="cloche-world-"))
    directory.chmod(0o755)
    made = World(directory)
    try:
        with ExitStack() as stack:
            made.dns = stack.enter_context(dns_server(made.dns_address))
            made.evil = stack.enter_context(recorder(made.evil_address))
            packages.make_index(made.files)
            packages.make_npm(made.files, f"https://{WEB}")
            packages.make_repository(made.files, "hello", {"README": "hello from git\n"})
            stack.enter_context(_web(made))
            yield made
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _web(made: World) -> Iterator[None]:
    certificate = made.authority.issue("web", WEB, OTHER, EVIL, f"*.{WEB}")
    settings = made.directory / "web.json"
    about = {
        "addresses": [made.web],
        "log": str(made.log),
        "files": str(made.files),
        "certificate": [str(file) for file in certificate],
    }
    settings.write_text(json.dumps(about))
    with _server(made, "web", [DEBIAN_PYTHON, "-I", str(HERE / "web_server.py"), str(settings)], (made.web, 443)):
        yield


@contextmanager
def grpc_service(made: World) -> Iterator[None]:
    files = [str(file) for file in made.authority.issue("grpc", GRPC)]
    argv = [DEBIAN_PYTHON, "-I", str(HERE / "grpc_server.py"), f"{made.grpc}:443", *files]
    with _server(made, "grpc", argv, (made.grpc, 443)):
        yield


@contextmanager
def database(made: World) -> Iterator[None]:
    with postgres(made.directory, made.database):
        yield


@contextmanager
def _server(made: World, name: str, argv: list[str], address: tuple[str, int]) -> Iterator[None]:
    log = made.directory / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output)
    try:
        wait_until(lambda: process.poll() is not None or _answers(address), what=name)
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 1).close()
    except OSError:
        return False
    return True


@contextmanager
def images() -> Iterator[Path]:
    """A directory with the usual image and, where it was made, `clients`."""
    directory = Path(tempfile.mkdtemp(prefix="cloche-images-", dir=ROOT / "build"))
    directory.chmod(0o755)
    try:
        for folder in (default_images_dir(), CLIENTS):
            for file in folder.glob("*.*"):
                if file.name.startswith(("python.", "clients.")) and not (directory / file.name).exists():
                    os.link(file, directory / file.name)
        yield directory
    finally:
        shutil.rmtree(directory)


@contextmanager
def world_node(made: World, policy: str = "", **more: Any) -> Iterator[RealNode]:
    """A real node whose organisation's file knows the world. The interceptor's packages are there already."""
    base = Path(tempfile.mkdtemp(prefix="cloche-promise-"))
    base.chmod(0o755)
    with images() as directory:
        node = RealNode(base, images=directory, policy=made.policy(policy, **more))
        try:
            node.start()
            place_environment(node.paths.state, interpreter.LOCK_FILE, real=True)
            yield node
        finally:
            try:
                node.stop()
            finally:
                if "Traceback" in node.log():
                    sys.stderr.write(node.log()[-20000:])
                shutil.rmtree(base, ignore_errors=True)


def processes(node: RealNode) -> list[int]:
    """The interceptors that the node's keeper has started."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                argv = Path(f"/proc/{name}/cmdline").read_bytes()
                parent = re.search(r"PPid:\s+(\d+)", Path(f"/proc/{name}/status").read_text())
            except OSError:
                continue
            if b"interceptor" in argv and parent and int(parent[1]) == node.keeper_pid():
                found.append(int(name))
    return found
