"""`python -I -S …/keeper/__main__.py SETTINGS`: finds the package by its own place, without site-packages."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))
    from cloche_server.keeper.main import main

    raise SystemExit(main(sys.argv))
