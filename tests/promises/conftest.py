"""The nodes that the promises are made by: one for a module, or one of its own for a test that breaks things."""

from collections.abc import Iterator

import pytest

from tests.promises.nodes import RealNode, real_node


@pytest.fixture(scope="module")
def node() -> Iterator[RealNode]:
    """A node shared by the tests of a module; none of them may kill its processes."""
    with real_node() as made:
        yield made


@pytest.fixture
def own_node() -> Iterator[RealNode]:
    """A node for one test, which may do to it what it likes."""
    with real_node() as made:
        yield made
