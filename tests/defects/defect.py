"""A planted defect: one control switched off, and the tests that must notice.

Standard library only: this is imported in every Python process of a planted run, the
keeper among them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Defect:
    """One entry of the catalogue.

    `patch` gets `module` right after that was imported, in every Python process of the run
    (test, daemon, keeper). `env` is set for the whole run. `agent_features` are cargo
    features of the guest agent: it is rebuilt with them, into a root file system of its own.
    """

    id: str
    req: str
    tests: tuple[str, ...]
    module: str = ""
    patch: Callable[[ModuleType], None] | None = None
    env: dict[str, str] = field(default_factory=dict)
    agent_features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.id.startswith(f"{self.req}/"), f"{self.id}: an id is <requirement>/<name>"
        assert bool(self.module) == bool(self.patch), f"{self.id}: module and patch go together"
        assert self.patch or self.env or self.agent_features, f"{self.id} changes nothing"
        assert self.tests, f"{self.id} names no test"

    @property
    def slug(self) -> str:
        return self.id.replace("/", "--").lower()


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(original)` in place of an attribute; one that is not there is an error.

    A patch of a name that was renamed would otherwise change nothing and prove nothing.
    """
    setattr(owner, name, make(getattr(owner, name)))
