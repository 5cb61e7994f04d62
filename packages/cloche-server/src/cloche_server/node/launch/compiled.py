"""The daemon compiled beforehand, by whoever may write beside its sources.

Installers differ in whether they leave compiled files. A machine's daemon is a user who may not write any: without them it
would compile itself and all that it imports at every start, which is more than half of its processor time until it serves.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

WITNESS: Final = Path(__file__).resolve().parents[1] / "__main__.py"
"""Compiled last, and imported by nothing else: where its compiled file is, the others are."""
COMPILE_S_MAX: Final = 60.0
MODULES: Final = (
    "cloche_server.node.main",
    "cloche_server.keeper.main",
    "cloche_server.egress.interception.authority",
    "cloche_server.images.build.compat",
    "cloche_server.images.outbound",
    "cloche_server.policy.yaml_tree",
    "cloche_server.node.__main__",
)
"""What keeper and daemon import at their start, and later at first need; then the witness."""


@contextmanager
def compiling() -> Iterator[None]:
    """Beside the first start: a process that imports it all, whereby Python leaves what it compiled. Else nothing."""
    if _is_compiled() or not _may_compile():
        yield
        return
    argv = [sys.executable, "-P", "-c", f"import {', '.join(MODULES)}"]
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", umask=0o022
    )
    try:
        yield
    finally:
        try:
            process.wait(COMPILE_S_MAX)
        except subprocess.TimeoutExpired:  # the daemon goes on as it is; the next start tries again
            process.kill()
            process.wait()


def _is_compiled() -> bool:
    """By one file for all: an installation is replaced as a whole."""
    try:
        return os.stat(importlib.util.cache_from_source(str(WITNESS))).st_mtime >= WITNESS.stat().st_mtime
    except FileNotFoundError:
        return False


def _may_compile() -> bool:
    return not os.environ.get("PYTHONDONTWRITEBYTECODE") and os.access(WITNESS.parent, os.W_OK)
