"""EXE-9: `cloche run -i` carries stdin and stdout byte for byte, in a conversation and in bulk."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import mcp.client.stdio
import pytest
from mcp import ClientSession, StdioServerParameters, stdio_client

from tests.promises import mcp_server
from tests.promises.nodes import CLI, RealNode, wait_until

pytestmark = pytest.mark.req("EXE-9")
SERVER = Path(mcp_server.__file__)
BULK_BYTES = 16 * 1024 * 1024


async def converse(command: list[str], env: dict[str, str], errors: Path, calls: int) -> list[str]:
    """A client of the `mcp` package talks to the server behind `command`; the texts it got."""
    server = StdioServerParameters(command=command[0], args=command[1:], env=env)
    texts: list[str] = []
    progress: list[float] = []

    async def note(done: float, total: float | None, message: str | None) -> None:
        progress.append(done)

    async def call(session: ClientSession, name: str, arguments: dict[str, object]) -> None:
        result = await session.call_tool(name, arguments, progress_callback=note)
        texts.append(result.content[0].text)  # type: ignore[union-attr]

    with errors.open("w") as errlog:
        async with stdio_client(server, errlog=errlog) as (read, write), ClientSession(read, write) as session:
            begun = await session.initialize()
            assert begun.server_info.name == "in"
            assert [tool.name for tool in (await session.list_tools()).tools] == ["echo", "large"]
            for number in range(calls):
                await call(session, "echo", {"text": f"{number} {mcp_server.LETTERS}"})
            await call(session, "large", {"count": 1_000_000})
            await call(session, "echo", {"text": mcp_server.large(300_000)})
            await session.send_ping()
    assert len(progress) == calls + 2
    return texts


def test_an_mcp_servers_conversation(
    node: RealNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_run: bool
) -> None:
    monkeypatch.setattr(mcp.client.stdio, "PROCESS_TERMINATION_TIMEOUT", 60.0)
    calls = 500 if long_run else 50
    inside = [str(CLI), "run", "-i", "--", "python3", "-c", SERVER.read_text()]
    command = [sys.executable, str(SERVER), "--tap", str(tmp_path), *inside]
    texts = asyncio.run(converse(command, node.environment, tmp_path / "errors", calls))
    assert texts[:calls] == [f"{number} {mcp_server.LETTERS}" for number in range(calls)]
    assert texts[calls:] == [mcp_server.large(1_000_000), mcp_server.large(300_000)]
    told = json.loads((tmp_path / "errors").read_text())
    up, down = ((tmp_path / name).read_bytes() for name in ("up", "down"))
    assert told == {"read": hashlib.sha256(up).hexdigest(), "written": hashlib.sha256(down).hexdigest()}
    assert (tmp_path / "code").read_text() == "7"
    print(f"{calls + 2} calls, {len(up)} bytes in and {len(down)} bytes out are equal on both sides")


def test_random_bytes_come_back(node: RealNode, seed: int) -> None:
    data = random.Random(seed).randbytes(BULK_BYTES - 256) + bytes(range(256))
    done = node.cloche("run", "-i", "--", "cat", stdin=data)
    assert (done.returncode, done.stderr, len(done.stdout)) == (0, b"", len(data))
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(data).digest()


def test_half_close_and_the_exit_code(node: RealNode, seed: int) -> None:
    """It answers only after end of file, on both outputs, and ends with a code of its own."""
    data = random.Random(seed + 1).randbytes(3_000_001)
    program = "sha256sum | cut -c1-64 >&2; head -c 1000000 /dev/zero; exit 9"
    done = node.cloche("run", "-i", "--", "sh", "-c", program, stdin=data)
    assert done.returncode == 9
    assert done.stderr.decode().strip() == hashlib.sha256(data).hexdigest()
    assert done.stdout == bytes(1_000_000)


def test_each_byte_comes_when_it_is_written(node: RealNode) -> None:
    """No side waits for more: one byte in, one byte out, while stdin stays open."""
    process = subprocess.Popen(
        [str(CLI), "run", "-i", "--", "cat"], env=node.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin
    assert process.stdout
    for number in (*range(0, 256, 5), 255):
        os.write(process.stdin.fileno(), bytes([number]))
        assert os.read(process.stdout.fileno(), 10) == bytes([number])
    process.stdin.close()
    assert (process.stdout.read(), process.wait(60)) == (b"", 0)


def test_a_command_that_ends_first_does_not_wait_for_stdin(node: RealNode) -> None:
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [str(CLI), "run", "-i", "--", "sh", "-c", "exit 4"], env=node.environment, stdin=reader
        )
        wait_until(lambda: process.poll() is not None, 60)
        assert process.returncode == 4
    finally:
        os.close(reader)
        os.close(writer)


def test_without_i_it_reads_end_of_file(node: RealNode) -> None:
    done = node.cloche("run", "--", "sh", "-c", "wc -c", stdin=b"not for it")
    assert (done.returncode, done.stdout.strip()) == (0, b"0")


def test_a_signal_reaches_the_command(node: RealNode) -> None:
    program = "trap 'echo caught; exit 21' TERM; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        [str(CLI), "run", "-i", "--", "sh", "-c", program],
        env=node.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    process.terminate()
    assert (process.stdout.read(), process.wait(60)) == (b"caught\n", 21)
