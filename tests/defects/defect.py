"""A planted defect: one control switched off, and the tests that must notice.

Standard library only: this is imported in every Python process of a planted run, the
keeper among them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Defect:
    """One entry of the catalogue.

    `patch` gets `module` right after that was imported, in every Python process of the run
    (test, daemon, keeper). `tests` are of that requirement; one of them must fail.

    A module `interceptor.X` is one of the interceptor, a process without our packages: its patch goes there as text, so
    it uses `replace` and what it imports itself, and nothing else of its file.
    """

    id: str
    req: str
    tests: tuple[str, ...]
    module: str
    patch: Callable[[ModuleType], None]

    def __post_init__(self) -> None:
        assert self.id.startswith(f"{self.req}/"), f"{self.id}: an id is <requirement>/<name>"
        assert self.tests, f"{self.id} names no test"

    @property
    def slug(self) -> str:
        return self.id.replace("/", "--").lower()

    @property
    def is_for_the_keeper(self) -> bool:
        """Whether the keeper, which starts without site-packages, has a part in it."""
        return self.is_for_the_interceptor or self.module.startswith(
            ("cloche_server.keeper.", "cloche_server.engines.")
        )

    @property
    def is_for_the_interceptor(self) -> bool:
        return self.module.startswith("interceptor.")


def of_one_test(name: str, test: str, module: str, patch: Callable[[ModuleType], None]) -> Defect:
    """The usual entry: its requirement is in its name."""
    return Defect(name, name.partition("/")[0], (test,), module, patch)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(original)` in place of an attribute; one that is not there is an error.

    A patch of a name that was renamed would otherwise change nothing and prove nothing.
    """
    setattr(owner, name, make(getattr(owner, name)))
