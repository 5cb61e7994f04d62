"""A real PostgreSQL on a loopback address, with a database of its own, for the time of a block."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.promises.nodes import wait_until

PORT = 5432
USER = "postgres"


def programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return found[-1].parent if found else None


@contextmanager
def postgres(directory: Path, address: str) -> Iterator[None]:
    """Trusts whoever comes: the gate is what is tested."""
    place = programs()
    assert place is not None, "apt-get install postgresql"
    data = directory / "postgres"
    data.mkdir(mode=0o700)
    become: list[str] = []
    if os.getuid() == 0:
        account = pwd.getpwnam(USER)
        os.chown(data, account.pw_uid, account.pw_gid)
        become = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
    argv = [*become, str(place / "initdb"), "-A", "trust", "-U", USER, "-N", "-D", str(data)]
    subprocess.run(argv, check=True, capture_output=True, cwd="/")
    more = [
        "-c",
        f"listen_addresses={address}",
        "-c",
        f"port={PORT}",
        "-c",
        "unix_socket_directories=",
        "-c",
        "fsync=off",
    ]
    with (directory / "postgres.log").open("wb") as log:
        server = subprocess.Popen(
            [*become, str(place / "postgres"), "-D", str(data), *more], stdout=log, stderr=log, cwd="/"
        )
    try:
        ready = [shutil.which("pg_isready") or str(place / "pg_isready"), "-q", "-h", address, "-p", str(PORT)]
        wait_until(lambda: subprocess.run(ready, check=False).returncode == 0, what="PostgreSQL")
        yield
    finally:
        server.terminate()
        server.wait(30)
