"""The programs of h2kit, started for a test."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.unit.interceptor.conftest import World

_KIT = Path(__file__).parent / "h2kit"
DEFECTIVE = _KIT / "defective.py"
Asked = dict[str, Any]


@contextmanager
def h2_server(python: Path, certificate: Path) -> Iterator[tuple[str, int]]:
    """Its address."""
    command = [python, "-I", "-B", _KIT / "server.py", certificate]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield ("127.0.0.1", int(process.stdout.readline()))
        process.kill()


class Http2:
    """One client connection, intercepted."""

    def __init__(
        self, world: World, python: Path, host: str = "h2.test", *, name: str | None = None, **how: Any
    ) -> None:
        self.host = host
        authority = world.directory / "lineage.pem"
        authority.write_text(world.lineage.cert)
        port = world.gate.listen(host, **how)
        command = [python, "-I", "-B", _KIT / "client.py", str(port), authority, name or host]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, method: str = "GET", path: str = "/echo", *headers: tuple[str, str], **more: Any) -> Asked:
        first = [[":method", method], [":scheme", "https"], [":authority", self.host], [":path", path]]
        return self.raw([*first, *map(list, headers)], **more)

    def raw(self, headers: list[list[str]], **more: Any) -> Asked:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"headers": headers, **more}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        found: Asked = json.loads(line) if line else {"failed": "no answer"}
        return found

    def __enter__(self) -> Http2:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def status(answer: Asked) -> int:
    return int(dict(map(tuple, answer.get("headers", []))).get(":status", 0))
