"""Applies one defect in this process, as soon as its target module has been imported.

`tools/defects.py` makes a virtual environment per defect whose start-up file calls
`plant()`. So it reaches every Python process the tests start, also those that get a clean
environment or run isolated (`python -I`), and production code knows nothing of it.

Standard library only, like everything it imports.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.defects.catalogue import by_id
from tests.defects.defect import Defect


def plant(defect_id: str, notes: str) -> None:
    """Arrange for the defect's patch; `notes` is a directory for what became of it."""
    defect = by_id(defect_id)
    if defect.patch is None:
        return
    if defect.module in sys.modules:
        _apply(defect, sys.modules[defect.module], Path(notes))
    else:
        sys.meta_path.insert(0, _Finder(defect, Path(notes)))


def _apply(defect: Defect, module: ModuleType, notes: Path) -> None:
    assert defect.patch is not None
    try:
        defect.patch(module)
    except Exception:  # any error means the patch no longer fits: said to the runner by a note
        _note(notes / f"error-{os.getpid()}", traceback.format_exc())
    else:
        _note(notes / f"planted-{os.getpid()}", defect.module)


def _note(path: Path, text: str) -> None:
    # In a namespace without that directory another process will say it.
    with contextlib.suppress(OSError):
        path.write_text(text)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the target as everybody else would, and patches it once it has run."""

    def __init__(self, defect: Defect, notes: Path) -> None:
        self._defect = defect
        self._notes = notes
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._defect.module or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._defect, self._notes)
        return spec


class _Loader(importlib.abc.Loader):
    """The real loader, and the patch after it."""

    def __init__(self, inner: importlib.abc.Loader, defect: Defect, notes: Path) -> None:
        self._inner = inner
        self._defect = defect
        self._notes = notes

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # `python -m` and importlib.resources look at the loader: leave the real one behind.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._inner
        self._inner.exec_module(module)
        _apply(self._defect, module, self._notes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # `python -m` asks for the code without executing it
