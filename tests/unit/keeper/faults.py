"""The keeper with a fault planted: fails, or dies by SIGKILL, at the point that a file beside its directory names.

The file `fault` in the state directory holds `fail POINT` or `kill POINT`; it is taken once.
"""

from __future__ import annotations

import json
import os
import signal
import sys

sys.path.insert(0, os.path.abspath(f"{__file__}/../../../../packages/cloche-server/src"))

from cloche_server.keeper import points
from cloche_server.keeper.main import main

FAULT = os.path.join(os.path.dirname(json.loads(sys.argv[1])["directory"]), "fault")


def reached(point: str) -> None:
    try:
        with open(FAULT) as file:
            how, _, where = file.read().strip().partition(" ")
    except FileNotFoundError:
        return
    if where == point:
        os.unlink(FAULT)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(f"planted at {point}")


points.reached = reached
raise SystemExit(main(sys.argv))
