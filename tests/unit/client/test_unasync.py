from __future__ import annotations

import pytest

from tools import unasync


@pytest.mark.req("UX-2")
@pytest.mark.parametrize("target", list(unasync.PAIRS.values()), ids=lambda path: path.name)
def test_the_sync_sdk_is_what_the_async_one_makes(target: object) -> None:
    [source] = [source for source, other in unasync.PAIRS.items() if other == target]
    path = unasync.PAIRS[source]
    assert path.read_text() == unasync.formatted(unasync.turned(source.read_text(), source), path), (
        "run tools/unasync.py"
    )


@pytest.mark.req("UX-2")
def test_nothing_is_in_the_sync_sdk_that_is_not_made() -> None:
    folder = unasync.CLIENT / "_sync"
    assert set(folder.glob("*.py")) == {path for path in unasync.PAIRS.values() if path.parent == folder}


@pytest.mark.req("UX-2")
def test_both_have_the_same_methods() -> None:
    from cloche import client

    for name in ("Sandbox", "Command", "Commands", "Files", "Ports", "PortConnection", "Node", "Terminal"):
        sync = {word for word in dir(getattr(client, name)) if not word.startswith("_")}
        awaited = {word for word in dir(getattr(client, f"Async{name}")) if not word.startswith("_")}
        assert sync == {"close" if word == "aclose" else word for word in awaited}
