"""The error classes by name: `from cloche.errors import SandboxEnded`."""

from __future__ import annotations

from .wire.errors import CLASSES, TABLE, ClocheError

globals().update({cls.__name__: cls for cls in CLASSES.values()})

__all__ = ["TABLE", "ClocheError", *(cls.__name__ for cls in CLASSES.values())]  # noqa: PLE0604
