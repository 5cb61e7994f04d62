"""An image whose agent is `evil_agent.c`, beside the usual one, in a directory that a node can use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from cloche_server.node.launch.places import default_images_dir

SOURCE = Path(__file__).with_name("evil_agent.c")


def make_images(directory: Path) -> Path:
    """`directory`, with the images `python` and `evil` in it."""
    for name in ("python.erofs", "python.json"):
        link_or_copy(default_images_dir() / name, directory / name)
    tree = directory / "tree"
    for place in (".cloche", "proc", "sys", "dev", "tmp", "etc"):
        (tree / place).mkdir(parents=True)
    for name in ("hosts", "machine-id"):
        (tree / "etc" / name).touch()
    (tree / "tmp" / ".keep").touch()
    agent = tree / ".cloche" / "agent"
    subprocess.run(["gcc", "-static", "-O1", "-o", str(agent), str(SOURCE)], check=True)
    agent.chmod(0o555)
    image = directory / "evil.erofs"
    options = ["--quiet", "-x-1", "-E", "noinline_data", "--all-root"]
    subprocess.run(["mkfs.erofs", *options, str(image), str(tree)], check=True, stdout=subprocess.DEVNULL)
    image.chmod(0o444)
    shutil.rmtree(tree)
    (directory / "evil.json").write_text(json.dumps({"config": {"User": "1000:1000", "WorkingDir": "/"}}))
    return directory


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
