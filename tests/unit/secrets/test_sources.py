"""Values from files, commands and servers: real ones, bounded, and silent about what they said."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.secrets.binding import Binding, bind
from cloche_server.secrets.minting import from_http
from cloche_server.secrets.sources import from_command, from_file
from tests.unit.secrets.room import ROOT, VALUE, Server, asked, token

PYTHON = sys.executable


def of(source: dict[str, Any]) -> Binding:
    return bind(ROOT, "TOKEN", asked(source), now=1.0)


def command(code: str) -> Binding:
    return of({"kind": "command", "argv": [PYTHON, "-c", code]})


async def fails(work: Any) -> str:
    with pytest.raises(ClocheError) as raised:
        await work
    assert raised.value.code == "secret_unavailable"
    assert raised.value.detail == {"secret": "TOKEN"}
    shown = f"{raised.value} {raised.value.message} {raised.value.detail} {raised.value.__cause__}"
    assert VALUE not in shown
    return raised.value.message


@pytest.mark.req("SEC-4")
async def test_a_file_is_read_without_its_line_end(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for content in (VALUE, f"{VALUE}\n", f"{VALUE}\r\n"):
        path.write_bytes(content.encode())
        assert (await from_file(of({"kind": "file", "path": str(path)}))).reveal() == VALUE.encode()
    path.write_text(f"{VALUE}\n\n")
    assert "control character" in await fails(from_file(of({"kind": "file", "path": str(path)})))


async def test_what_is_no_ordinary_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        assert "ordinary file" in await fails(from_file(of({"kind": "file", "path": str(path)})))
    assert "No such file" in await fails(from_file(of({"kind": "file", "path": str(tmp_path / "none")})))
    (tmp_path / "large").write_bytes(b"x" * 70_000)
    assert "more than" in await fails(from_file(of({"kind": "file", "path": str(tmp_path / "large")})))


@pytest.mark.req("SEC-4")
async def test_a_command_gives_its_output_and_gets_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAEMONS_OWN", "planted")
    assert (await from_command(command(f"print({VALUE!r})"))).reveal() == VALUE.encode()
    look = "import os,sys; print(len(sys.stdin.read()), 'DAEMONS_OWN' in os.environ, sorted(os.environ)[0], os.getcwd(), len(os.listdir('/proc/self/fd')))"
    seen = (await from_command(command(look))).reveal().decode().split()
    assert seen[:2] == ["0", "False"]
    assert (seen[3], seen[4]) == ("/", "4"), "stdin, stdout, stderr and the look itself"


async def test_a_command_that_fails_says_only_how() -> None:
    assert "exit code 3" in await fails(
        from_command(command(f"import sys; print({VALUE!r}); sys.stderr.write({VALUE!r}); sys.exit(3)"))
    )
    assert "No such file" in await fails(from_command(of({"kind": "command", "argv": ["/no/such/program"]})))
    assert "fewer than" in await fails(from_command(command("print('x')")))


async def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 60 & echo $$ $! > {pids}; wait"
    began = time.monotonic()
    assert "did not end" in await fails(
        from_command(of({"kind": "command", "argv": ["/bin/sh", "-c", script]}), time_s_max=1.5)
    )
    assert time.monotonic() - began < 5
    for pid in pids.read_text().split():
        assert _state(pid) in (None, "Z"), "it lives on"


def _state(pid: str) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


async def test_a_command_that_never_stops_talking_is_cut_off() -> None:
    began = time.monotonic()
    assert "more than" in await fails(from_command(command("while True: print('x' * 1000)")))
    assert time.monotonic() - began < 5


@pytest.mark.req("SEC-4")
async def test_a_server_mints_by_a_field_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODES_TOKEN", "s.1234")
    source = {
        "kind": "http",
        "field": "data.token",
        "headers_from": {"X-Vault-Token": "$NODES_TOKEN", "X-Plain": "yes"},
    }
    with Server(token(VALUE)) as server:
        assert (await from_http(of({**source, "url": server.url}))).reveal() == VALUE.encode()
        method, path, headers, body = server.seen[0]
        assert (method, path, body) == ("GET", "/v1/token", b"")
        assert (headers["x-vault-token"], headers["x-plain"]) == ("s.1234", "yes")
        await from_http(of({**source, "url": server.url, "method": "POST", "body": '{"role": "ci"}'}))
        assert (server.seen[1][0], server.seen[1][3]) == ("POST", b'{"role": "ci"}')
        server.answer((200, f"{VALUE}\n".encode()))
        assert (await from_http(of({"kind": "http", "url": server.url}))).reveal() == VALUE.encode()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((403, VALUE.encode()), "answered 403"),
        ((302, VALUE.encode()), "answered 302"),
        ((200, VALUE.encode()), "not JSON"),
        ((200, b'{"data": {"other": "' + VALUE.encode() + b'"}}'), "no text at data.token"),
        ((200, b'{"data": {"token": ["' + VALUE.encode() + b'"]}}'), "no text at data.token"),
        ((200, b"[" * 100_000), "not JSON"),
        ((200, b'{"data": {"token": "' + b"x" * 200_000 + b'"}}'), "more than"),
        ((200, b'{"data": {"token": "a\\r\\nSet-Cookie: b"}}'), "control character"),
    ],
)
async def test_what_a_server_says_otherwise_is_dropped(answer: tuple[int, bytes], said: str) -> None:
    with Server(answer) as server:
        assert said in await fails(from_http(of({"kind": "http", "url": server.url, "field": "data.token"})))
        assert len(server.seen) == 1, "no redirect is followed, nothing is tried again"


async def test_a_server_that_is_slow_or_gone_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        began = time.monotonic()
        assert "did not answer within" in await fails(from_http(of({"kind": "http", "url": url}), time_s_max=0.5))
        assert time.monotonic() - began < 3
    assert "cannot be asked" in await fails(from_http(of({"kind": "http", "url": url})))


async def test_a_server_that_drips_is_given_up() -> None:
    async def drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await asyncio.sleep(0.05)

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    assert "did not answer within" in await fails(from_http(of({"kind": "http", "url": url}), time_s_max=0.5))
    server.close()


async def test_a_variable_that_the_node_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NODES_TOKEN", raising=False)
    source = {"kind": "http", "url": "http://127.0.0.1:9/", "headers_from": {"X-A": "$NODES_TOKEN"}}
    assert "NODES_TOKEN" in await fails(from_http(of(source)))


async def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with Server((200, VALUE.encode())) as server:
        assert len(await from_http(of({"kind": "http", "url": server.url}))) == len(VALUE)
