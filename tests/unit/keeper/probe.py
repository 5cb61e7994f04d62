"""A daemon for tests of keeper and engines: the real launcher starts it, a test drives it over a unix socket.

It does what the node's daemon does with a keeper and nothing else. One JSON object a line in, one out. Run as
`probe.py --mode … --state-dir … …` by `harness.Node`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import cloche_engine
from cloche.wire.errors import ClocheError
from cloche_server.engines.contract import EngineError, Instance, ProcessEnd
from cloche_server.engines.converter.starter import ConverterStarter, Worker
from cloche_server.engines.gvisor.engine import GVisorEngine
from cloche_server.engines.spec import SandboxSpec
from cloche_server.images.worker import Converter, LayerFile
from cloche_server.keeper.client import KeeperGone, KeeperRefused
from cloche_server.node.launch import keepers
from cloche_server.node.launch.keepers import PROGRAM, KeeperHouse
from cloche_server.node.launch.places import NodePaths, microvm_dir


class Probe:
    def __init__(self, house: KeeperHouse) -> None:
        self.house = house
        self.engines: dict[str, Any] = {}
        self.instances: dict[str, Instance] = {}
        self.watch: asyncio.Task[None] | None = None
        self.converters = ConverterStarter(lambda: self.house.client)
        self.workers: dict[str, Worker] = {}
        self.conversion: Any = None

    def engine(self, name: str) -> Any:
        if name not in self.engines:
            if name == "gvisor":
                self.engines[name] = GVisorEngine(cloche_engine.runsc_path(), lambda: self.house.client)
            else:
                module: Any = importlib.import_module("cloche_server.engines.qemu.engine")
                self.engines[name] = module.QemuEngine(microvm_dir(), lambda: self.house.client)
        return self.engines[name]

    async def boot(self, spec: dict[str, Any]) -> Any:
        instance = await self.engine(spec["engine"]).boot(SandboxSpec.from_object(spec))
        self.instances[spec["id"]] = instance
        report = instance.isolation()
        return {"pid": instance.pid, "host_uid": report.host_uid, "cgroup": report.cgroup, "digest": report.digest}

    async def adopt(self, spec: dict[str, Any]) -> Any:
        instance = await self.engine(spec["engine"]).adopt(SandboxSpec.from_object(spec))
        if isinstance(instance, ProcessEnd):
            return None
        self.instances[spec["id"]] = instance
        return {"pid": instance.pid}

    async def start(self, sandbox: str) -> Any:
        await self.instances[sandbox].start()

    async def seal(self, sandbox: str) -> Any:
        await self.instances[sandbox].seal()

    async def pause(self, sandbox: str) -> Any:
        await self.instances[sandbox].pause()

    async def resume(self, sandbox: str) -> Any:
        await self.instances[sandbox].resume()

    async def export(self, sandbox: str, path: str, bytes_max: int = 1 << 30) -> Any:
        sink = os.open(path, os.O_WRONLY)
        try:
            return await self.instances[sandbox].export_upper(sink, bytes_max=bytes_max)
        finally:
            os.close(sink)

    async def export_to_nobody(self, sandbox: str) -> Any:
        source, sink = os.pipe()
        os.close(source)
        try:
            await self.instances[sandbox].export_upper(sink, bytes_max=1 << 30)
        finally:
            os.close(sink)

    async def export_and_cancel(self, sandbox: str) -> Any:
        source, sink = os.pipe()
        task = asyncio.create_task(self.instances[sandbox].export_upper(sink, bytes_max=1 << 30))
        await asyncio.to_thread(os.read, source, 1)  # the first byte: it is under way
        task.cancel()
        await asyncio.wait([task])
        os.close(source)
        os.close(sink)
        assert task.cancelled()

    async def capabilities(self, engine: str) -> Any:
        return asdict(self.engine(engine).capabilities())

    async def stats(self, sandbox: str) -> Any:
        stats = self.instances[sandbox].stats()
        return {"cpu_s": stats.cpu_s, "memory_bytes": stats.memory_bytes, "peak": stats.memory_peak_bytes}

    async def kill(self, sandbox: str) -> Any:
        end = await self.instances.pop(sandbox).kill()
        return {"oom_kills": end.oom_kills, "status": end.status}

    async def wait_dead(self, sandbox: str) -> Any:
        await self.instances[sandbox].wait_dead()

    async def send(self, sandbox: str, hexed: str) -> Any:
        channel = self.instances[sandbox].channel
        channel.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(channel, bytes.fromhex(hexed))

    async def receive(self, sandbox: str, timeout_s: float = 10.0) -> Any:
        channel = self.instances[sandbox].channel
        channel.setblocking(False)
        data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(channel, 1 << 16), timeout_s)
        return data.hex()

    async def facts(self) -> Any:
        return {**self.house.client.facts, "daemon": os.getpid()}

    async def everything(self) -> Any:
        return [
            {"id": held.id, "alive": held.alive, "channel": held.channel, "sealed": held.sealed}
            for held in await self.house.client.everything()
        ]

    async def replace(self) -> Any:
        await self.house.replace({name: instance.channel for name, instance in self.instances.items()})

    async def start_watch(self) -> Any:
        channels = lambda: {name: instance.channel for name, instance in self.instances.items()}  # noqa: E731
        self.watch = asyncio.create_task(self.house.watch(channels))

    async def end_by_id(self, sandbox: str) -> Any:
        ended = await self.house.client.kill(sandbox)
        return {"oom_kills": ended.oom_kills, "status": ended.status}

    async def boot_many(self, specs: list[dict[str, Any]]) -> Any:
        return await asyncio.gather(*(self.boot(spec) for spec in specs))

    async def boot_and_kill(self, spec: dict[str, Any]) -> Any:
        booting = asyncio.create_task(self.boot(spec))
        await asyncio.sleep(0.02)
        await self.house.client.kill(spec["id"])
        return await booting

    async def worker(self, memory_bytes: int = 64 << 20, disk_bytes: int = 64 << 20) -> Any:
        made = await self.converters(memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        self.workers[made.id] = made
        return {"id": made.id, "pid": made.pid}

    async def worker_says(self, worker: str) -> Any:
        channel = self.workers[worker].channel
        channel.setblocking(False)
        return (await asyncio.wait_for(asyncio.get_running_loop().sock_recv(channel, 1 << 16), 10)).decode()

    async def worker_hears(self, worker: str, text: str) -> Any:
        await asyncio.get_running_loop().sock_sendall(self.workers[worker].channel, text.encode())

    async def convert(self) -> Any:
        """Begins a conversion whose only layer never comes; the worker and mkfs wait for it behind all their walls."""
        started: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()

        async def start(**fields: int) -> Worker:
            made = await self.converters(**fields)
            started.set_result(made)
            return made

        source, target = os.pipe()
        files = [os.open(self.house._paths.state, os.O_TMPFILE | os.O_RDWR, 0o666) for _ in range(3)]
        layer = LayerFile(source, "none", 1 << 20, "sha256:" + "0" * 64, "sha256:" + "0" * 64)
        task = asyncio.create_task(Converter(start).image([layer], *files))
        self.conversion = (task, target, [source, *files])
        made = await started
        return {"id": made.id, "pid": made.pid}

    async def end_conversion(self, cancel: bool) -> Any:
        task, target, files = self.conversion
        if cancel:
            task.cancel()
        os.close(target)
        await asyncio.wait([task])
        for fd in files:
            os.close(fd)
        if task.cancelled():
            return "cancelled"
        return task.result()

    async def end_worker(self, worker: str) -> Any:
        made = self.workers.pop(worker)
        said = made.last_words()
        oom_kills = await made.kill()
        return {"oom_kills": oom_kills, "said": said, "live": sorted(self.converters.live)}

    async def descriptors(self) -> Any:
        return len(os.listdir("/proc/self/fd"))

    async def stop_keeper(self, purge: bool) -> Any:
        await self.house.client.stop(purge=purge)

    async def answer(self, line: bytes) -> bytes:
        asked = json.loads(line)
        try:
            result = await getattr(self, asked.pop("do"))(**asked)
            return json.dumps({"ok": result}).encode()
        except (EngineError, KeeperRefused, ClocheError) as refused:
            return json.dumps({"error": refused.code, "message": str(refused)}).encode()
        except KeeperGone as gone:
            return json.dumps({"error": "keeper_gone", "message": str(gone)}).encode()
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
        "config-dir",
        "keeper-socket",
        "accept",
        "program",
        "converter",
    ):
        parser.add_argument(f"--{name}", default="")
    options = parser.parse_args()
    store = Path(options.store_dir) if options.store_dir else None
    paths = NodePaths(Path(options.state_dir), Path(options.run_dir), Path(options.images_dir), store)
    accept = tuple(name for name in options.accept.split(",") if name)
    program = Path(options.program) if options.program else PROGRAM
    if options.converter:
        directories = keepers.engine_directories
        keepers.engine_directories = lambda: {**directories(), "converter": options.converter}
    house = KeeperHouse(paths, mode=options.mode, accept=accept, program=program)
    await house.ensure()
    probe = Probe(house)

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

    server = await asyncio.start_unix_server(serve, str(paths.api_socket), limit=1 << 20)
    os.chmod(paths.api_socket, 0o777)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
