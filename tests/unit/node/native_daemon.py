"""A whole daemon over the native engine, to be killed: `native_daemon.py STATE IMAGES HOLDER SOCKET [POINT:COUNT]`.

With a point, the process kills itself (-9) when it has reached that point so often.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import uvloop

from cloche_server import points
from cloche_server.api.server import serve
from cloche_server.node.node import Config, Node
from tests.unit.node.native_engine import NativeEngine


def die_at(point: str, count: int) -> None:
    left = count

    def reached(here: str) -> None:
        nonlocal left
        if here == point:
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    points.reached = reached


async def run(state: Path, images: Path, holder: Path, address: Path) -> None:
    node = Node(Config(state, images), {"gvisor": NativeEngine(holder)})
    await node.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    serving = asyncio.create_task(serve(node, socket_path=address, socket_mode=0o600))
    await stop.wait()
    serving.cancel()
    await node.stop()


if __name__ == "__main__":
    state_dir, images_dir, holder_path, socket_path, *more = sys.argv[1:]
    if more:
        name, _, times = more[0].partition(":")
        die_at(name, int(times))
    uvloop.run(run(Path(state_dir), Path(images_dir), Path(holder_path), Path(socket_path)))
