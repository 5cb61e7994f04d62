"""A preset is what the operator's own tool is configured to use: with a company's mirror, `pip install` inside just works."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.promises.egress.clients import PLACE, TRUST
from tests.promises.egress.worlds import WEB, World, needs_clients, needs_world, world_node
from tests.promises.nodes import RealNode

pytestmark = [needs_world, needs_clients, pytest.mark.timeout(180)]

INSTALL = (
    "pip install -q --disable-pip-version-check --no-cache-dir --target /tmp/p cloche-hello"
    " && PYTHONPATH=/tmp/p python3 -c 'import cloche_hello; print(cloche_hello.hello())'"
)


@pytest.fixture
def mirrored(earth: World) -> Iterator[RealNode]:
    """A node whose operator's pip uses the mirror at `web.test`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_INDEX_URL", f"https://user:password@{WEB}/simple")
        with world_node(earth) as made:
            yield made


@pytest.mark.req("NET-3")
def test_pip_uses_the_operators_mirror(mirrored: RealNode, earth: World) -> None:
    rules = ["preset:python-packages"]
    with mirrored.sandbox(image="clients", memory_mb=512, cpus=2, env=TRUST, egress=rules) as box:
        box.files.write(PLACE, earth.ca)
        result = box.run(INSTALL, timeout_s=60)
        assert "hello from the wheel" in result.stdout, (result.stdout, result.stderr)
        assert "password" not in box.run("env; pip config list").stdout, "a mirror's credentials stay outside"
        used = {record.rule for record in box.egress.records() if record.verdict == "allowed"}
        assert used == {"egress[0]/python-packages[0]"}
