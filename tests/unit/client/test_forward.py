from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from cloche import ClocheError, Node, Sandbox
from cloche.client._target import parse_url
from tests.unit.api.served import served


@pytest.mark.req("EXE-8")
def test_a_local_port_is_the_one_inside(tmp_path: Path) -> None:
    with served(tmp_path) as node, Node(parse_url(node.url, None)) as asked:
        box = Sandbox.create(node=asked)
        before = threading.active_count()
        with box.ports.forward(8000) as forward:
            assert str(forward.local_port) in repr(forward)
            for _ in range(3):
                with socket.create_connection(forward.address, timeout=20) as one:
                    one.sendall(b"hello")
                    assert one.recv(100) == b"hello"
                    one.shutdown(socket.SHUT_WR)
                    assert [one.recv(100), one.recv(100)] == [b"bye", b""]
            with pytest.raises(ClocheError) as raised:
                box.ports.forward(8000, forward.local_port)
            assert raised.value.code == "conflict"
        assert threading.active_count() == before
        with box.ports.forward(1) as nobody, socket.create_connection(nobody.address, timeout=20) as one:
            assert one.recv(100) == b""
            assert nobody.last_error is not None
            assert nobody.last_error.code == "connection_refused"
