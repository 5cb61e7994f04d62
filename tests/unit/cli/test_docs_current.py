"""The reference is what the code says; what the specification names is there."""

import re

from tools import render_docs

NAMED_TEST = re.compile(r"`(tests/[\w/]+(?:\.py)?)`")


def test_rendered_pages_are_current() -> None:
    assert not list(render_docs.stale()), "python -m tools.render_docs"


def test_each_promise_names_a_test_that_exists_or_says_that_there_is_none() -> None:
    text = (render_docs.ROOT / "SPECIFICATION.md").read_text()
    promises = re.findall(r"^\d+\. .*?(?=^\d+\. |^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(promises) > 25
    for promise in promises:
        named = NAMED_TEST.findall(promise)
        assert named or "[no test]" in promise, promise
        missing = [name for name in named if not (render_docs.ROOT / name).exists()]
        assert not missing, f"{missing} of promise {promise[:60]!r}"
