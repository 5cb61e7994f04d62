"""The daemon's process: one at a time, without privilege, from its arguments to a served API and back.

SIGTERM stops the daemon and leaves every sandbox alive for the next one. Ending sandboxes is the API's business.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import uvloop

from cloche.wire.errors import ClocheError, error
from cloche_server.api.caller import ApiKey, TcpConfig
from cloche_server.api.server import serve
from cloche_server.egress.interception.supervisor import Interception
from cloche_server.engines.contract import Engine, EngineError
from cloche_server.engines.converter.starter import ConverterStarter
from cloche_server.engines.gvisor.engine import GVisorEngine
from cloche_server.engines.interceptor.starter import InterceptorStarter
from cloche_server.engines.qemu.engine import QemuEngine
from cloche_server.logs import Log
from cloche_server.node import start
from cloche_server.node.guest_text import escaped
from cloche_server.node.launch.keepers import KeeperHouse, ensure_keeper, find_runsc
from cloche_server.node.launch.places import (
    MODES,
    NodePaths,
    default_config_dir,
    default_images_dir,
    default_run_dir,
    default_state_dir,
    microvm_dir,
)
from cloche_server.node.node import Config, Node
from cloche_server.node.stock import stock_of

HANDOVER_S: Final = 30.0
SOCKET_MODE: Final = {"machine": 0o666, "user": 0o600}
"""A machine's socket is for all its users: each is known by the kernel's word and sees only his own."""


def main(argv: list[str] | None = None) -> int:
    """The entry point `cloche-node`."""
    asked = parse(argv)
    set_up_logs()
    log = Log()
    paths = NodePaths(asked.state_dir, asked.run_dir, asked.images_dir, asked.store_dir, asked.config_dir)
    try:
        with daemon_lock(paths.run, wait_s=HANDOVER_S if asked.replace else 0.0):
            raise_descriptor_limit()
            forbid_core_dumps()
            uvloop.run(run(paths, asked))
    except ClocheError as bad:
        log.error("the node cannot run", code=bad.code, message=bad.message, fix=bad.fix)
        return bad.kind.exit_code
    except EngineError as bad:
        log.error("the engine cannot run", code=bad.code, message=str(bad))
        return 125
    return 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cloche-node", description="The node daemon; `cloche up` starts it.")
    parser.add_argument("--mode", choices=MODES, default="user")
    parser.add_argument("--state-dir", type=Path, default=None)
    parser.add_argument("--run-dir", type=Path, default=None)
    parser.add_argument("--images-dir", type=Path, default=None, help="root file systems made elsewhere; only read")
    parser.add_argument("--store-dir", type=Path, default=None, help="the image store; else in the state directory")
    parser.add_argument("--config-dir", type=Path, default=None, help="the operator's files: policy, trust, registries")
    parser.add_argument("--accept", default="", help="walls given up by name, with commas between")
    parser.add_argument("--listen", default=None, help="HOST:PORT for TCP; the unix socket is always there")
    parser.add_argument("--keeper-socket", type=Path, default=None, help="only below the run directory")
    parser.add_argument("--replace", action="store_true", help="wait for a daemon that is on its way out")
    return parser


def parse(argv: list[str] | None) -> argparse.Namespace:
    asked = arguments().parse_args(argv)
    asked.state_dir = (asked.state_dir or default_state_dir(asked.mode)).absolute()
    asked.run_dir = (asked.run_dir or default_run_dir(asked.mode)).absolute()
    asked.images_dir = (asked.images_dir or default_images_dir()).absolute()
    asked.store_dir = asked.store_dir.absolute() if asked.store_dir is not None else None
    asked.config_dir = (asked.config_dir or default_config_dir(asked.mode)).absolute()
    asked.accept = tuple(word for word in asked.accept.split(",") if word)
    return asked


async def run(paths: NodePaths, asked: argparse.Namespace) -> None:
    """Keeper, engines, adoption, then the API until SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    paths = with_image_directories(paths)
    house = await ensure_keeper(paths, mode=asked.mode, accept=asked.accept)
    async with contextlib.AsyncExitStack() as undo:
        undo.push_async_callback(house.end_if_idle)
        node = Node(config_of(paths, asked, house), engines_of(house))
        watch = asyncio.create_task(house.watch(node.channels), name="keeper watch")
        undo.callback(watch.cancel)
        held = {row.id for row in await house.client.everything()}  # what starts from here on is this daemon's own
        await node.start()
        await end_strays(node, house, held)
        undo.pop_all()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, node.read_policy)
    node.context.spawn(end_late_strays(node, house), "late strays")
    serving = asyncio.create_task(
        serve(
            node,
            socket_path=paths.api_socket,
            socket_mode=SOCKET_MODE[asked.mode],
            tcp=tcp_of(asked.listen),
            on_ready=lambda: notify_ready(node),
            admin_uids=frozenset({0} if asked.mode == "machine" else {0, os.geteuid()}),
        ),
        name="api",
    )
    stopping = asyncio.create_task(stop.wait(), name="stop")
    done, _ = await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    for task in (serving, watch, stopping):
        task.cancel()
    await asyncio.wait([serving, watch, stopping])
    await node.stop()
    if serving in done and not serving.cancelled() and (bad := serving.exception()) is not None:
        await house.end_if_idle()
        raise bad


def with_image_directories(paths: NodePaths) -> NodePaths:
    """The keeper holds both open. Without a directory of prebuilt roots the store's own is looked at."""
    paths.store.mkdir(parents=True, exist_ok=True)
    return paths if paths.images.is_dir() else replace(paths, images=paths.store)


async def end_strays(node: Node, house: KeeperHouse, among: set[str]) -> None:
    """What the keeper holds and no journal knows of: nobody could ever reach it, so it goes."""
    held = {row.id for row in await house.client.everything()} & among
    for stray in node.leaks(engines=held, cgroups=set()).engines:
        node.context.journal.write("node.stray_ended", sandbox=stray)
        await house.client.kill(stray)


async def end_late_strays(node: Node, house: KeeperHouse) -> None:
    """The same for sandboxes that were still being adopted then, and whose adoption failed."""
    late = await start.late(node.roster)
    if late:
        await end_strays(node, house, late)


def config_of(paths: NodePaths, asked: argparse.Namespace, house: KeeperHouse) -> Config:
    return Config(
        state_dir=paths.state,
        images_dir=paths.images,
        layers_dir=paths.keeper_dir,
        mode=asked.mode,
        accepted=asked.accept,
        keeper_pid=lambda: house.client.pid,
        cgroup=_shown(house.client.facts.get("cgroups")),
        config_dir=asked.config_dir,
        interception=lambda secrets, file, channels: Interception(
            directory=paths.state,
            start=InterceptorStarter(lambda: house.client, before=lambda: house.show_interceptor(channels())),
            box=secrets.box,
            extra_roots=lambda: file.organisation.ca_file,
        ),
        stock=stock_of(paths.images, paths.store, asked.config_dir, ConverterStarter(lambda: house.client)),
    )


def _shown(cgroups: Any) -> str | None:
    """The delegated parent; of the several of version 1, the one that counts memory."""
    dirs = cgroups["dirs"] if cgroups else {}
    return dirs.get("memory") or next(iter(dirs.values()), None)


def engines_of(house: KeeperHouse) -> Mapping[str, Engine]:
    found: dict[str, Engine] = {"gvisor": GVisorEngine(find_runsc(), lambda: house.client, house.weaker)}
    microvm = microvm_dir()
    if microvm is not None:
        try:
            found["qemu"] = QemuEngine(microvm, lambda: house.client, house.weaker)
        except EngineError as bad:  # experimental: a node without it goes on, and refuses microVMs by name
            Log().warning("no microVMs", code=bad.code, message=str(bad))
    return found


def tcp_of(listen: str | None) -> TcpConfig | None:
    """`HOST:PORT`, with the node's key from its environment: never from the command line, which all can read."""
    if listen is None:
        return None
    host, _, port = listen.rpartition(":")
    secret = os.environ.get("CLOCHE_NODE_KEY")
    if not host or not port.isdigit():
        raise error("invalid_request", "--listen is HOST:PORT.")
    if not secret:
        raise error("invalid_request", "Listening on TCP needs a key: set CLOCHE_NODE_KEY.")
    certificate, key = os.environ.get("CLOCHE_TLS_CERTIFICATE"), os.environ.get("CLOCHE_TLS_KEY")
    return TcpConfig(
        host.strip("[]"),
        int(port),
        (ApiKey.of("node", secret, is_admin=True),),
        tls_certificate=Path(certificate) if certificate else None,
        tls_key=Path(key) if key else None,
    )


@contextlib.contextmanager
def daemon_lock(run_dir: Path, *, wait_s: float) -> Iterator[None]:
    """One daemon at a time. The lock dies with the process, however it dies."""
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o755)
    fd = os.open(run_dir / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take_lock(fd, wait_s)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def _take_lock(fd: int, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                raise error(
                    "node_busy", f"Another daemon (process {holder}) serves here.", detail={"pid": holder}
                ) from None
            time.sleep(0.02)


def raise_descriptor_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def forbid_core_dumps() -> None:
    """It holds values of secrets: a crash must not write them to a disk."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def notify_ready(node: Node) -> None:
    """To the log, and to systemd or a launcher that waits for it."""
    Log().info("ready", sandboxes=len(node.roster.live), generation=node.context.store.generation)
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifier:
            notifier.sendto(b"READY=1", "\0" + address[1:] if address.startswith("@") else address)


def set_up_logs() -> None:
    """What other libraries log goes to stderr as well, in the form of ours."""
    logging.basicConfig(level=logging.WARNING, handlers=[_Plain(sys.stderr)], force=True)


class _Plain(logging.StreamHandler[Any]):
    """One JSON object a line; control characters never reach a terminal raw."""

    def format(self, record: logging.LogRecord) -> str:
        return f'{{"event": "log", "logger": "{record.name}", "message": "{escaped(super().format(record), 4000)}"}}'
