"""Starts the interceptor: `PYTHON -I -B main.py`, with the control channel as descriptor 0.

It is started by path, where nothing of ours is installed; so it makes its own directory a package first.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path


def _as_package(directory: Path) -> str:
    spec = importlib.util.spec_from_file_location(
        "interceptor", directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    if spec is None or spec.loader is None:
        raise ImportError("the interceptor's own directory cannot be read")
    package = importlib.util.module_from_spec(spec)
    sys.modules["interceptor"] = package
    spec.loader.exec_module(package)
    return package.__name__


if __name__ == "__main__":
    importlib.import_module(f"{_as_package(Path(__file__).parent)}.service").main()
