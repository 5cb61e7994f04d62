"""A daemon for tests of the interceptor's process: the real launcher starts it, and it starts interceptors by the real keeper.

One JSON object a line in, one out, as `tests/unit/keeper/probe.py`. Its gate's side is small: it dials one upstream of the test's by
loopback, relays, and answers what it was told to. Run by `interceptor_node.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.pop(0)  # its own folder, which has names that mean others elsewhere
sys.path.insert(0, str(Path(__file__).parents[3]))

from cloche.wire.errors import ClocheError
from cloche.wire.ids import DEFAULT_TENANT
from cloche.wire.secrets import Place
from cloche_server.egress.interception import interpreter
from cloche_server.egress.interception.environment import Environment
from cloche_server.egress.interception.supervisor import Interception
from cloche_server.egress.services import Who
from cloche_server.engines.interceptor import command
from cloche_server.engines.interceptor.starter import InterceptorStarter
from cloche_server.node.launch import keepers
from cloche_server.node.launch.keepers import KeeperHouse
from cloche_server.node.launch.places import NodePaths
from cloche_server.policy.model import Decision, Effect, Target
from cloche_server.secrets.box import Box
from cloche_server.secrets.hidden import Hidden
from cloche_server.secrets.leases import Lease


class Side:
    """What a gate does for one connection."""

    def __init__(self, probe: Probe, allow: bool) -> None:
        self.probe = probe
        self.allow = allow
        self.seen: list[list[Any]] = []
        self.is_over = False

    async def dial(self) -> socket.socket:
        self.seen.append(["dial"])
        tcp = socket.socket()
        tcp.setblocking(False)
        await asyncio.get_running_loop().sock_connect(tcp, ("127.0.0.1", self.probe.upstream))
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.probe.keep(_relay(tcp, ours))
        self.probe.keep(_relay(ours, tcp))
        return theirs

    async def request(self, method: str, path: str) -> Decision:
        self.seen.append(["request", method, path])
        if path == "/wait":
            await asyncio.Event().wait()
        effect = Effect.ALLOW if self.allow else Effect.DENY
        return Decision(effect, "egress[0]", "allowed" if self.allow else "path_not_allowed", "so it is")

    def alert(self, kind: str, where: str, secret: str) -> None:
        self.seen.append(["alert", kind, where, secret])

    def denied(self, code: str, text: str, method: str | None, path: str | None) -> None:
        self.seen.append(["denied", code, text, method, path])

    def closed(self) -> None:
        self.is_over = True


async def _relay(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        while data := await loop.sock_recv(source, 1 << 16):
            await loop.sock_sendall(sink, data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        return


class Probe:
    def __init__(self, house: KeeperHouse, state: Path, lock: Path) -> None:
        self.house = house
        self.lock = lock
        self.state = state
        self.upstream = 0
        self.lines: list[str] = []
        self.interception = self._made()
        self.sides: dict[int, tuple[Side, socket.socket]] = {}
        self.tasks: set[asyncio.Task[Any]] = set()

    def _made(self, **more: Any) -> Interception:
        roots = self.state / "extra.pem"
        return Interception(
            directory=self.state,
            start=InterceptorStarter(lambda: self.house.client, before=lambda: self.house.show_interceptor({})),
            box=Box(self.state / "keys" / "secrets.key", self.state / "secrets" / "key.id"),
            extra_roots=lambda: roots if roots.exists() else None,
            environment=Environment(self.state / "interceptor", interpreter.find(), lock=self.lock),
            progress=self.lines.append,
            **more,
        )

    def keep(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def who(self, sandbox: str, lineage: str) -> Who:
        return Who(sandbox, "uid:0", DEFAULT_TENANT, lineage)

    async def again(self, idle_s: float) -> Any:
        """Another supervisor, as after a daemon's restart."""
        await self.interception.close()
        self.interception = self._made(idle_s=idle_s)

    async def prepare(self, sandbox: str, lineage: str) -> Any:
        made = await self.interception.prepare(self.who(sandbox, lineage))
        return {"pem": made.pem.decode(), "java": len(made.java or b""), "lines": self.lines}

    async def secrets(self, sandbox: str, lineage: str, secrets: dict[str, str], hosts: list[str]) -> Any:
        place = Place(kind="header", name="authorization", format="Bearer {}")
        leases = [
            Lease(
                name,
                f"cloche_ph_{name.lower():x<32}",
                Hidden(value.encode()),
                tuple(hosts),
                None,
                None,
                (place,),
                False,
            )
            for name, value in secrets.items()
        ]
        self.interception.sandbox(self.who(sandbox, lineage), leases)
        return [lease.placeholder for lease in leases]

    async def forget(self, sandbox: str) -> Any:
        self.interception.forget(sandbox)

    async def open(
        self,
        sandbox: str,
        lineage: str,
        host: str,
        port: int = 443,
        tls: bool = False,
        allow: bool = True,
        upstream: int = 0,
    ) -> Any:
        self.upstream = upstream
        if sandbox not in self.interception._sandboxes:
            self.interception.sandbox(self.who(sandbox, lineage), [])
        side = Side(self, allow)
        end = await self.interception.open(
            side, self.who(sandbox, lineage), Target(host, port), tls=tls, rule="egress[0]"
        )
        number = len(self.sides) + 1
        self.sides[number] = (side, end)
        return number

    async def send(self, conn: int, text: str) -> Any:
        await asyncio.get_running_loop().sock_sendall(self.sides[conn][1], text.encode("latin-1"))

    async def receive(self, conn: int, timeout_s: float = 10.0) -> Any:
        try:
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.sides[conn][1], 1 << 16), timeout_s)
        except ConnectionResetError:
            return ""
        return data.decode("latin-1")

    async def listen(self, conn: int) -> Any:
        """A loopback port whose next connection is this one's client: for real clients in the test."""
        end = self.sides[conn][1]
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)

        async def serve() -> None:
            client, _ = await asyncio.get_running_loop().sock_accept(listener)
            listener.close()
            client.setblocking(False)
            await asyncio.gather(_relay(client, end), _relay(end, client))
            client.close()
            end.close()

        self.keep(serve())
        return listener.getsockname()[1]

    async def seen(self, conn: int) -> Any:
        side, _ = self.sides[conn]
        return {"seen": side.seen, "over": side.is_over}

    async def close(self, conn: int) -> Any:
        self.sides[conn][1].close()

    async def processes(self) -> Any:
        held = await self.house.client.everything()
        return [
            {"id": row.id, "pid": row.pid, "uid": row.host_uid, "alive": row.alive}
            for row in held
            if row.engine == "interceptor"
        ]

    async def end(self, sandbox: str) -> Any:
        await self.house.client.kill(sandbox)

    async def facts(self) -> Any:
        return {**self.house.client.facts, "daemon": os.getpid()}

    async def descriptors(self) -> Any:
        return len(os.listdir("/proc/self/fd"))

    async def stop(self) -> Any:
        await self.interception.close()

    async def problem(self) -> Any:
        return self.interception.problem()

    async def answer(self, line: bytes) -> bytes:
        asked = json.loads(line)
        try:
            result = await getattr(self, asked.pop("do"))(**asked)
            return json.dumps({"ok": result}).encode()
        except ClocheError as refused:
            return json.dumps({"error": refused.code, "message": f"{refused.message} | {refused.fix}"}).encode()
        except Exception as failure:  # a probe that dies tells its test nothing
            traceback.print_exc()
            return json.dumps({"error": type(failure).__name__, "message": str(failure)}).encode()


async def main() -> None:
    parser = argparse.ArgumentParser()
    for name in (
        "mode",
        "state-dir",
        "run-dir",
        "images-dir",
        "store-dir",
        "keeper-socket",
        "config-dir",
        "accept",
        "double",
        "blind",
    ):
        parser.add_argument(f"--{name}", default="")
    options, _ = parser.parse_known_args()
    store = Path(options.store_dir) if options.store_dir else None
    paths = NodePaths(Path(options.state_dir), Path(options.run_dir), Path(options.images_dir), store)
    if options.double:
        real = keepers.beside_directories
        keepers.beside_directories = lambda: {**real(), command.PROGRAM: options.double} if real() else {}
    house = KeeperHouse(paths, mode=options.mode)
    beside = keepers.beside_directories
    if options.blind:  # as if Python were installed later
        keepers.beside_directories = dict
    await house.ensure()
    keepers.beside_directories = beside
    lock = Path(options.double) / "requirements.lock" if options.double else interpreter.LOCK_FILE
    probe = Probe(house, paths.state, lock)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if line.startswith(b"GET "):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            while line:
                writer.write(await probe.answer(line) + b"\n")
                await writer.drain()
                line = await reader.readline()
        writer.close()

    server = await asyncio.start_unix_server(serve, str(paths.api_socket), limit=1 << 22)
    os.chmod(paths.api_socket, 0o777)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
