"""A sandbox in the middle of things: one command prints, one reads stdin by offset, and short ones run one after another.

Each is checked byte for byte at the end, against what this side computes or sent.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from cloche.client import Command, Node, Sandbox
from tests.promises.nodes import RealNode, wait_until

PRINTER = """
import hashlib, os, sys, time
seed, flood_every, n, out = sys.argv[1], int(sys.argv[2]), 0, sys.stdout.buffer
while not os.path.exists("/tmp/stop"):
    line = f"{n:08d} {hashlib.sha256(f'{seed} {n}'.encode()).hexdigest()}\\n".encode()
    out.write(line * (1 if n % flood_every else 2000))
    out.flush()
    n += 1
    time.sleep(0.02)
out.write(f"end {n:08d}\\n".encode())
"""
READER = """
import hashlib, os
digest, count = hashlib.sha256(), 0
while data := os.read(0, 65536):
    digest.update(data)
    count += len(data)
print(count, digest.hexdigest())
"""
ENDING_BYTES = len("end 00000000\n")


def printed(seed: str, flood_every: int, count: int) -> bytes:
    """What PRINTER writes in `count` rounds."""
    parts = []
    for n in range(count):
        line = f"{n:08d} {hashlib.sha256(f'{seed} {n}'.encode()).hexdigest()}\n".encode()
        parts.append(line * (1 if n % flood_every else 2000))
    return b"".join([*parts, f"end {count:08d}\n".encode()])


@dataclass
class Figures:
    """What went through, and came out equal."""

    printed_bytes: int = 0
    stdin_bytes: int = 0
    short_commands: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.printed_bytes + other.printed_bytes,
            self.stdin_bytes + other.stdin_bytes,
            self.short_commands + other.short_commands,
        )


class Conversation:
    """Three threads, each with a client of its own that must get through whatever happens to the node."""

    def __init__(self, node: RealNode, seed: str, *, flood_every: int = 40, pause_s: float = 0.1) -> None:
        self._node = node
        self._pause_s = pause_s
        self._seed = seed
        self._flood_every = flood_every
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._heard = bytearray()
        self._sent = hashlib.sha256()
        self._sent_bytes = 0
        self._short = 0
        with node.client() as client:
            self.box_id = Sandbox.create(node=client, ttl_s=7200, memory_mb=256).id
            commands = self._box(client).commands
            wide = {"output_bytes_max": 1 << 30}
            self._printer = commands.start(["python3", "-c", PRINTER, seed, str(flood_every)], **wide).id  # type: ignore[arg-type]
            self._reader = commands.start(["python3", "-c", READER], stdin=True).id
        self._threads = [
            threading.Thread(target=self._run, args=(part,), daemon=True)
            for part in (self._listen, self._talk, self._count)
        ]
        for thread in self._threads:
            thread.start()
        self.wait_for_progress((0, 0, 0))

    def _box(self, client: Node) -> Sandbox:
        return Sandbox.connect(self.box_id, node=client)

    def _command(self, client: Node, command: str) -> Command:
        return self._box(client).commands.get(command)

    def _run(self, part: Callable[[Node], None]) -> None:
        try:
            with self._node.client() as client:
                part(client)
        except BaseException as failure:  # told by `finish`, in the test's own thread
            self._failures.append(failure)

    def _listen(self, client: Node) -> None:
        """One reader for the whole time; it reconnects by cursor."""
        for chunk in self._command(client, self._printer).output():
            assert chunk.fd == 1, chunk
            self._heard += chunk.data

    def _talk(self, client: Node) -> None:
        chance = random.Random(f"{self._seed} stdin")
        command = self._command(client, self._reader)
        while not self._stop.wait(self._pause_s):
            data = chance.randbytes(
                chance.randrange(50_000, 300_000) if chance.random() < 0.2 else chance.randrange(1, 2000)
            )
            command.write_stdin(data)
            self._sent.update(data)
            self._sent_bytes += len(data)
        command.close_stdin()

    def _count(self, client: Node) -> None:
        """Short commands, each of which must run exactly once."""
        commands = self._box(client).commands
        while not self._stop.wait(self._pause_s):
            line = f"echo {self._short} >>/workspace/once; echo {self._short}"
            result = commands.run(["sh", "-c", line])
            assert (result.stdout, result.exit_code) == (f"{self._short}\n", 0), result
            self._short += 1

    @property
    def progress(self) -> tuple[int, int, int]:
        return len(self._heard), self._sent_bytes, self._short

    def wait_for_progress(self, before: tuple[int, int, int]) -> None:
        """Until all three have got further. A client is patient for a time, and any progress begins it anew."""

        def is_further() -> bool:
            self.check()
            return all(now > then for now, then in zip(self.progress, before, strict=True))

        wait_until(is_further, 120, f"reader, writer and short commands of {self.box_id} to go on from {before}")

    def check(self) -> None:
        """What has failed so far."""
        if self._failures:
            raise self._failures[0]

    def finish(self) -> Figures:
        """Ends the three, and compares."""
        self._stop.set()
        with self._node.client() as client:
            box = self._box(client)
            self._threads[2].join(120)
            box.run(["touch", "/tmp/stop"], check=True)
            for thread in self._threads:
                thread.join(120)
            self.check()
            assert not any(thread.is_alive() for thread in self._threads), "a reader or writer hangs"
            assert box.info().ended is None
            self._compare_printed(client)
            read = self._command(client, self._reader).result()
            assert read.stdout == f"{self._sent_bytes} {self._sent.hexdigest()}\n", f"stdin differs: {read}"
            once = box.files.read("/workspace/once").decode()
            assert once.split() == [str(n) for n in range(self._short)], "a short command ran twice, or never"
        return Figures(len(self._heard), self._sent_bytes, self._short)

    def _compare_printed(self, client: Node) -> None:
        heard = bytes(self._heard)
        rounds = int(heard[-ENDING_BYTES:].split()[1])
        expected = printed(self._seed, self._flood_every, rounds)
        again = self._command(client, self._printer).result()
        for name, found in (("heard on the way", heard), ("read again", again.stdout_bytes)):
            assert found == expected, f"{name}: {difference(found, expected)}"
        assert (again.exit_code, again.stderr_bytes) == (0, b"")


def difference(found: bytes, expected: bytes) -> str:
    """Where two byte strings part, for a person."""
    at = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected))
    )
    return f"{len(found)} bytes for {len(expected)}; from {at}: {found[at : at + 80]!r} for {expected[at : at + 80]!r}"
