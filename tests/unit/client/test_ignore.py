"""`.dockerignore`, as Docker reads it."""

import pytest

from cloche.client._ignore import Ignore, parse


@pytest.mark.parametrize(
    ("text", "path", "ignored"),
    [
        ("*.log", "a.log", True),
        ("*.log", "dir/a.log", False),
        ("**/*.log", "dir/deep/a.log", True),
        ("**/*.log", "a.log", True),
        ("dir", "dir/deep/file", True),
        ("/dir/", "dir/file", True),
        ("./dir", "dir", True),
        ("d?r", "dir", True),
        ("d?r", "d/r", False),
        ("[a-c]x", "bx", True),
        ("[^a-c]x", "bx", False),
        ("\\*x", "*x", True),
        ("\\*x", "ax", False),
        ("# dir", "# dir", False),
        ("dir/*\n!dir/keep", "dir/keep", False),
        ("dir/*\n!dir/keep", "dir/other", True),
        ("!keep\nkeep", "keep", True),
        ("**", "anything/at/all", True),
        ("**\n!src", "src/a", False),
        ("a/**/b", "a/b", True),
        ("a/**/b", "a/x/y/b", True),
        ("[", "[", False),
        ("a.b", "axb", False),
        ("\ufeffdir", "dir", True),
        ("", "dir", False),
    ],
)
def test_rules(text: str, path: str, ignored: bool) -> None:
    assert Ignore(parse(text)).is_ignored(path) is ignored


def test_a_directory_is_skipped_whole_only_when_nothing_below_comes_back() -> None:
    assert Ignore(parse("dir")).skips("dir", True)
    assert not Ignore(parse("dir\n!dir/keep")).skips("dir", True)
    assert Ignore(parse("dir\n!dir/keep")).skips("dir/other", False)
    kept = Ignore(parse("*"), frozenset({"docker/Dockerfile"}))
    assert not kept.skips("docker", True)
    assert not kept.skips("docker/Dockerfile", False)
    assert kept.skips("docker/other", False)
