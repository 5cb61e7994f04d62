"""What stands inside for a value: random, the same for a whole lineage, and found again in whatever form it travels. Pure."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping
from typing import Final

from cloche_server.interceptor.forms import Sight

PREFIX: Final = "cloche_ph_"
RANDOM_CHARS: Final = 32
ALPHABET: Final = string.ascii_letters + string.digits
PATTERN: Final = re.compile(rf"{PREFIX}[A-Za-z0-9]{{{RANDOM_CHARS}}}")


def new_placeholder() -> str:
    """190 random bits: nobody meets it by chance, and it says nothing of the value."""
    return PREFIX + "".join(secrets.choice(ALPHABET) for _ in range(RANDOM_CHARS))


class Placeholders:
    """Those of one sandbox, for whoever sees bytes that leave it. `by_name` is what its environment holds."""

    def __init__(self, by_name: Mapping[str, str]) -> None:
        self.by_name = dict(by_name)
        self._sight = Sight({name: placeholder.encode() for name, placeholder in by_name.items()})

    def found(self, text: bytes) -> str | None:
        """The name of a secret whose placeholder is in `text`, in any form that the interceptor knows too."""
        return self._sight.find(text)
