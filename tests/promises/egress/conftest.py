"""One world for all egress promises of a run, and a node in it for each module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.promises.egress.worlds import World, world, world_node
from tests.promises.nodes import RealNode


@pytest.fixture(scope="session")
def earth() -> Iterator[World]:
    """Real servers on loopback. Whoever changes its DNS answers changes them back."""
    with world() as made:
        yield made


@pytest.fixture(scope="module")
def node(earth: World) -> Iterator[RealNode]:
    """A node whose organisation lets requests ask for anything, and whose addresses may be the world's."""
    with world_node(earth) as made:
        yield made
