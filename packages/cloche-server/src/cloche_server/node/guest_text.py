"""Text that a guest chose, before a person sees it."""

from __future__ import annotations

from cloche_server.egress.text import escaped

__all__ = ["escaped"]
