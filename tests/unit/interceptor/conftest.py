"""The real interceptor with a small gate, and servers for it to reach."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.interceptor import authorities
from tests.unit.interceptor.environment import interceptor_python
from tests.unit.interceptor.gate import Gate, Loop
from tests.unit.interceptor.servers import Http1Server

NAMES = ("api.test", "other.test", "h2.test", "ws.test", "plain.test")


@pytest.fixture(scope="session")
def interceptor_interpreter() -> Path:
    return interceptor_python()


@dataclass
class World:
    """A running interceptor and what is around it."""

    gate: Gate
    lineage: authorities.Pair
    root: authorities.Pair
    leaf: authorities.Pair
    loop: Loop
    directory: Path
    http1: Http1Server


@pytest.fixture(scope="module")
def world(interceptor_interpreter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("world")
    root = authorities.authority("the world")
    leaf = authorities.leaf(root, *NAMES)
    loop = Loop()
    gate = Gate(interceptor_interpreter, directory / "log")
    lineage = gate.lineage("l1")
    gate.send({"t": "trust", "pem": root.cert})
    gate.sandbox("s1")
    http1 = Http1Server(authorities.server_context(directory, leaf, "http/1.1"))
    plain = Http1Server(None)
    loop.run(http1.start())
    loop.run(plain.start())
    gate.upstreams[("api.test", 443)] = gate.upstreams[("other.test", 443)] = http1.address
    gate.upstreams[("plain.test", 80)] = plain.address
    yield World(gate, lineage, root, leaf, loop, directory, http1)
    gate.close()
    loop.stop()
    print((directory / "log").read_text())
