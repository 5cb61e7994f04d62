"""The node daemon with `sentry.c` in the engine's place: `fake_engine_daemon.py PLANT <the daemon's own arguments>`."""

import sys
from pathlib import Path

import cloche_engine

PLANT = Path(sys.argv.pop(1))
cloche_engine.runsc_path = lambda: PLANT / "engine" / "runsc"

from cloche_server.node import main  # noqa: E402 (after the engine was replaced)

if __name__ == "__main__":
    sys.exit(main.main())
