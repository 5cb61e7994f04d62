"""The command line of the interceptor: pure, standard library, `engines.plan` and `engines.spec` only.

The interpreter is the base one and not that of the virtual environment, whose links lead to where the operator installed
Python: perhaps a closed home. The keeper binds the directories, and the packages are found by `BOOT`.
"""

from __future__ import annotations

from typing import Final

from cloche_server.engines.plan import Places, Plan
from cloche_server.engines.spec import BadSpec, SandboxSpec

PYTHON: Final = "interceptor-python"
"""The prefix of an interpreter."""
PROGRAM: Final = "interceptor-program"
"""The package `cloche_server.interceptor`."""
MAIN: Final = "main.py"
BOOT: Final = (
    "import ctypes, runpy, sys\n"
    "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"  # PR_SET_DUMPABLE: nobody of the same id reads its memory
    "site, main = sys.argv[1:3]\n"
    "sys.path.append(site)\n"
    "sys.argv = [main]\n"
    "runpy.run_path(main, run_name='__main__')\n"
)
STATE_BYTES_MAX: Final = 0


def plan(spec: SandboxSpec, places: Places) -> Plan:
    python, program = places.beside.get(PYTHON), places.beside.get(PROGRAM)
    if python is None or program is None:
        raise BadSpec("engine: the keeper was started without an interpreter for the interceptor")
    version = spec.image_file.partition("-")[0]
    site = f"{places.engine}/{spec.image_file}/lib/python{version}/site-packages"
    return Plan(
        argv=(f"{python}/bin/python{version}", "-I", "-S", "-B", "-c", BOOT, site, f"{program}/{MAIN}"),
        env={"LD_LIBRARY_PATH": f"{python}/lib", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2"},
        file_bytes_max=0,
        open_files=spec.open_files,
        bare=True,
        read_only=True,
    )


def control_path(sandbox: str) -> None:
    """There is no control socket."""


def engine_pids(state: bytes) -> tuple[int, int]:
    """Never asked: it leaves no state file."""
    raise ValueError("an interceptor has no state file")
