"""Lists of rules by name.

`python-packages`, `node-packages`, `debian` and `rust-packages` are what the operator's own tools say they use, so a
company's mirror just works, and no registry is named here. `git-hosts` and `model-apis` are reviewed lists, data/*.toml.
"""

from __future__ import annotations

import threading
import time
import tomllib
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Final

from cloche.wire.egress import EgressRule
from cloche.wire.errors import error
from cloche_server.policy.operator_tools import Preset, Tools

KEPT_S: Final = 600.0
"""A tool is asked again after this: its configuration may have changed."""
LISTS: Final = ("git-hosts", "model-apis")

__all__ = ["Preset", "Presets"]


class Presets:
    """Presets by name, each found out at first need and kept for a while. Blocks while a tool is asked: seconds."""

    def __init__(self, tools: Tools | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        tools = tools or Tools()
        self._makers: dict[str, Callable[[], Preset]] = {
            "python-packages": tools.pip,
            "node-packages": tools.npm,
            "debian": tools.apt,
            "rust-packages": tools.cargo,
        }
        for name in LISTS:
            self._makers[name] = lambda name=name: read_list(name)  # type: ignore[misc]
        self._clock = clock
        self._kept: dict[str, tuple[float, Preset]] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._makers))

    def __call__(self, name: str) -> Preset:
        """`preset_unavailable` where there is none, or its tool cannot be asked."""
        maker = self._makers.get(name)
        if maker is None:
            raise error("preset_unavailable", f"There is no preset '{name[:64]}'; there are: {', '.join(self.names)}.")
        with self._lock:
            kept = self._kept.get(name)
            if kept is None or self._clock() - kept[0] > KEPT_S:
                kept = (self._clock(), maker())
                self._kept[name] = kept
        return kept[1]

    def env(self, names: Iterable[str]) -> dict[str, str]:
        """What tools inside need for these presets, in one."""
        found: dict[str, str] = {}
        for name in names:
            found.update(self(name).env)
        return found


def read_list(name: str) -> Preset:
    """One of the reviewed lists of this package."""
    text = resources.files("cloche_server.policy").joinpath("data", f"{name}.toml").read_text("utf-8")
    rows = tomllib.loads(text)["rule"]
    rules = tuple(EgressRule(host=row["host"], ports=row.get("ports", [443]), protocol="web") for row in rows)
    return Preset(name, rules, {}, f"{name}.toml")
