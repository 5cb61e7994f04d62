"""Freezes the API's description: `python tools/openapi.py [--check]` writes (or compares) protocol/openapi.json."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import cast

from cloche_server.api.backend import Backend
from cloche_server.api.caller import Rules
from cloche_server.api.openapi import render
from cloche_server.api.server import make_app

FROZEN = Path(__file__).resolve().parents[1] / "protocol" / "openapi.json"


def rendered() -> str:
    return render(make_app(cast("Backend", None), Rules()))  # describing asks nothing of the backend


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if it would change")
    check = parser.parse_args().check
    text = rendered()
    if FROZEN.exists() and FROZEN.read_text() == text:
        return 0
    if check:
        print("stale protocol/openapi.json: run tools/openapi.py, and say in the changelog what changed")
        return 1
    FROZEN.write_text(text)
    print("made protocol/openapi.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
