"""The reference is what the code says; every promise shows its tests, or that it has none."""

import re

import pytest

from tools import render_docs


@pytest.mark.parametrize("page", sorted(render_docs.PAGES))
def test_rendered_pages_are_current(page: str) -> None:
    assert page not in render_docs.stale(), "python -m tools.render_docs"


def test_each_promise_shows_its_tests_or_says_that_there_is_none() -> None:
    text = (render_docs.ROOT / "SPECIFICATION.md").read_text()
    promises = re.findall(r"^\d+\. .*?(?=^\d+\. |^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(promises) > 25
    for promise in promises:
        assert re.search(r"\([A-Z]+-\d+[^)]*\) → (`tests/|\*\*\[no test\])", promise), promise
