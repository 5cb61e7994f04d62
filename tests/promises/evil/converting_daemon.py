"""The node daemon, which begins a conversion that never ends once it is ready, if the file PLANT/convert is there.

`converting_daemon.py PLANT <the daemon's own arguments>`; PLANT/worker then names the worker's id and process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from cloche_server.engines.converter.starter import ConverterStarter, Worker
from cloche_server.images.worker import Converter, LayerFile
from cloche_server.node import main

PLANT = Path(sys.argv.pop(1))
HOUSES: list[Any] = []
TASKS: list[asyncio.Task[Any]] = []
ensure_keeper, notify_ready = main.ensure_keeper, main.notify_ready


async def ensure(*arguments: Any, **more: Any) -> Any:
    HOUSES.append(await ensure_keeper(*arguments, **more))
    return HOUSES[0]


def ready(node: Any) -> None:
    notify_ready(node)
    if (PLANT / "convert").exists():
        TASKS.append(asyncio.get_running_loop().create_task(convert()))


async def convert() -> None:
    starter = ConverterStarter(lambda: HOUSES[0].client)

    async def start(**fields: int) -> Worker:
        made = await starter(**fields)
        (PLANT / "new").write_text(f"{made.id} {made.pid}")
        (PLANT / "new").rename(PLANT / "worker")
        return made

    os.mkfifo(PLANT / "layer")
    source = os.open(PLANT / "layer", os.O_RDWR)  # its own writer: it does not end when this daemon does
    os.unlink(PLANT / "layer")
    files = [os.open(PLANT, os.O_TMPFILE | os.O_RDWR, 0o666) for _ in range(3)]
    layer = LayerFile(source, "none", 1 << 20, "sha256:" + "0" * 64, "sha256:" + "0" * 64)
    await Converter(start).image([layer], *files)


main.ensure_keeper, main.notify_ready = ensure, ready

if __name__ == "__main__":
    sys.exit(main.main())
