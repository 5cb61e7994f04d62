"""A checkpoint image of a running sandbox, as the engine writes it: asked for on the sentry's own control socket."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from tests.promises.nodes import RealNode

PARTS = ("checkpoint.img", "pages_meta.img", "pages.img")
"""In the order in which the sentry takes their descriptors; the last has the guest's pages as they are."""
ANSWER_S = 60.0
BLOCK = 4 << 20


def checkpoint(node: RealNode, sandbox: str, folder: Path) -> list[Path]:
    """Its files. The sandbox runs on."""
    (control,) = node.paths.state.rglob(f"runsc-{sandbox}.sock")
    files = [folder / part for part in PARTS]
    handles = [path.open("wb") for path in files]
    directory = os.open(control.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(f"/proc/self/fd/{directory}/{control.name}")  # its whole path may be too long
            asked = {"method": "containerManager.Checkpoint", "arg": {"have_pages_file": True, "Resume": True}}
            rights = array.array("i", [handle.fileno() for handle in handles])
            connection.sendmsg([json.dumps(asked).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            answer = json.loads(connection.recv(1 << 16))
            assert answer["success"], answer
    finally:
        os.close(directory)
        for handle in handles:
            handle.close()
    return files


def blocks_of(files: list[Path]) -> Iterator[bytes]:
    for path in files:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                yield block
