"""The interceptor's virtual environment, made once from its hash lock and kept in the build cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import cloche_server.interceptor as package

_ROOM = Path(package.__file__).parent
_CACHE = Path(os.environ.get("CLOCHE_BUILD_CACHE", "~/.cache/cloche-build")).expanduser()


def base_interpreter() -> Path:
    """The first interpreter of a version that the interceptor is tested with."""
    for version in (_ROOM / "python.txt").read_text().split():
        kept = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python{version}"))
        if kept:
            return kept[-1]
        if found := shutil.which(f"python{version}"):
            return Path(found)
    raise AssertionError("the interceptor needs one of the versions in interceptor/python.txt")


def interceptor_python() -> Path:
    """The environment's interpreter; makes the environment when it is missing."""
    lock = _ROOM / "requirements.lock"
    base = base_interpreter()
    name = hashlib.sha256(lock.read_bytes() + str(base).encode()).hexdigest()[:16]
    place = _CACHE / f"interceptor-{name}"
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "interceptor.lock").open("w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        if not place.exists():
            new = place.with_suffix(".new")
            shutil.rmtree(new, ignore_errors=True)
            subprocess.run([base, "-m", "venv", new], check=True)
            pip = [new / "bin/python", "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "-r", lock]
            subprocess.run(pip, check=True)
            new.rename(place)
    return place / "bin/python"
