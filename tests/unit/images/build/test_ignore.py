"""`.dockerignore` and globs. The tables are what moby's patternmatcher v0.6.1 and Go's filepath.Match answer."""

import time

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.images.build.glob import Automaton, BadPattern, match_tokens
from cloche_server.images.build.ignore import FILE_BYTES_MAX, Ignore, candidates, kept

PATHS = [
    "a",
    "b",
    "a/b",
    "a/b/c",
    "a/x/c",
    "a/x/y/c",
    "x.txt",
    "a/x.txt",
    "foob",
    "axc",
    "ab",
    "a/q/b",
    "a.b",
    "aXb",
    "*",
    "cx",
    "docs/README.md",
    "docs/s/t.md",
    "(a|b)",
    "#a",
]
IGNORED = [
    ("*.txt", ["x.txt"]),
    ("**/*.txt", ["x.txt", "a/x.txt"]),
    ("a", ["a", "a/b", "a/b/c", "a/x/c", "a/x/y/c", "a/x.txt", "a/q/b"]),
    ("a/", ["a", "a/b", "a/b/c", "a/x/c", "a/x/y/c", "a/x.txt", "a/q/b"]),
    ("/a", ["a", "a/b", "a/b/c", "a/x/c", "a/x/y/c", "a/x.txt", "a/q/b"]),
    ("a/**", ["a/b", "a/b/c", "a/x/c", "a/x/y/c", "a/x.txt", "a/q/b"]),
    ("**/b", ["b", "a/b", "a/b/c", "a/q/b"]),
    ("**b", ["b", "a/b", "a/b/c", "foob", "ab", "a/q/b", "a.b", "aXb"]),
    ("a/*/c", ["a/b/c", "a/x/c"]),
    ("a/**/c", ["a/b/c", "a/x/c", "a/x/y/c"]),
    (
        "*\n!a/b",
        [
            "a",
            "b",
            "a/x/c",
            "a/x/y/c",
            "x.txt",
            "a/x.txt",
            "foob",
            "axc",
            "ab",
            "a/q/b",
            "a.b",
            "aXb",
            "*",
            "cx",
            "docs/README.md",
            "docs/s/t.md",
            "(a|b)",
            "#a",
        ],
    ),
    ("a\n!a/b", ["a", "a/x/c", "a/x/y/c", "a/x.txt", "a/q/b"]),
    ("a\n!a/b\na/b/c", ["a", "a/b/c", "a/x/c", "a/x/y/c", "a/x.txt", "a/q/b"]),
    ("# c\n  a  ", ["a", "a/b", "a/b/c", "a/x/c", "a/x/y/c", "a/x.txt", "a/q/b"]),
    (" #a", ["#a"]),
    ("[ab]", ["a", "b", "a/b", "a/b/c", "a/x/c", "a/x/y/c", "a/x.txt", "a/q/b"]),
    ("[^a]", ["b", "*"]),
    ("\\*", ["*"]),
    ("a?c", ["axc"]),
    ("x**", ["x.txt"]),
    ("a**b", ["a/b", "a/b/c", "ab", "a/q/b"]),
    ("../a", []),
    ("./a", ["a", "a/b", "a/b/c", "a/x/c", "a/x/y/c", "a/x.txt", "a/q/b"]),
    ("a//b", ["a/b", "a/b/c"]),
    (".", []),
    (
        "**",
        [
            "a",
            "b",
            "a/b",
            "a/b/c",
            "a/x/c",
            "a/x/y/c",
            "x.txt",
            "a/x.txt",
            "foob",
            "axc",
            "ab",
            "a/q/b",
            "a.b",
            "aXb",
            "*",
            "cx",
            "docs/README.md",
            "docs/s/t.md",
            "(a|b)",
            "#a",
        ],
    ),
    (
        "**/",
        [
            "a",
            "b",
            "a/b",
            "a/b/c",
            "a/x/c",
            "a/x/y/c",
            "x.txt",
            "a/x.txt",
            "foob",
            "axc",
            "ab",
            "a/q/b",
            "a.b",
            "aXb",
            "*",
            "cx",
            "docs/README.md",
            "docs/s/t.md",
            "(a|b)",
            "#a",
        ],
    ),
    ("(a|b)", ["(a|b)"]),
    ("a.b", ["a.b"]),
    ("*/b\n!*/b/c", ["a/b"]),
    (
        "!**\n*",
        [
            "a",
            "b",
            "a/b",
            "a/b/c",
            "a/x/c",
            "a/x/y/c",
            "x.txt",
            "a/x.txt",
            "foob",
            "axc",
            "ab",
            "a/q/b",
            "a.b",
            "aXb",
            "*",
            "cx",
            "docs/README.md",
            "docs/s/t.md",
            "(a|b)",
            "#a",
        ],
    ),
    ("docs/**/*.md\n!docs/README.md", ["docs/s/t.md"]),
    ("[a-c]x", ["cx"]),
    ("**/**/c", ["a/b/c", "a/x/c", "a/x/y/c"]),
]
GLOB_NAMES = ["a", "b", "ab", "abc", "axbxc", "aXc", "ac", "cx", "*", "]", "a/c", "a/b", "", ".a"]
GLOBS = [
    ("*", ["a", "b", "ab", "abc", "axbxc", "aXc", "ac", "cx", "*", "]", "", ".a"]),
    ("a*", ["a", "ab", "abc", "axbxc", "aXc", "ac"]),
    ("*a", ["a", ".a"]),
    ("a*b*c", ["abc", "axbxc"]),
    ("?", ["a", "b", "*", "]"]),
    ("[ab]c", ["ac"]),
    ("[^a]*", ["b", "cx", "*", "]", ".a"]),
    ("\\*", ["*"]),
    ("*/c", ["a/c"]),
    ("a/*", ["a/c", "a/b"]),
    ("[\\]]", ["]"]),
    ("a?c", ["abc", "aXc"]),
    ("[a-c]x", ["cx"]),
    ("", [""]),
]


@pytest.mark.req("IMG-2")
@pytest.mark.parametrize(("rules", "ignored"), IGNORED)
def test_names_are_ignored_as_by_docker(rules: str, ignored: list[str]) -> None:
    judge = Ignore(rules.encode())
    assert [path for path in PATHS if judge.ignores(path)] == ignored


@pytest.mark.parametrize(("pattern", "matching"), GLOBS)
def test_globs_match_as_in_go(pattern: str, matching: list[str]) -> None:
    automaton = Automaton([match_tokens(pattern)])
    assert [name for name in GLOB_NAMES if automaton.matched(name)] == matching


@pytest.mark.parametrize("pattern", ["[", "[]", "[a-", "[a-]", "[-a]", "a[b", "a\\"])
def test_a_broken_glob_is_refused(pattern: str) -> None:
    with pytest.raises(BadPattern):
        match_tokens(pattern)


@pytest.mark.parametrize(("rules", "line"), [("!", 1), ("a\n[a-", 2), ("# c\na\n\na[", 4), ("a\\", 1)])
def test_a_broken_rule_is_refused_with_its_line(rules: str, line: int) -> None:
    with pytest.raises(ClocheError, match=f"line {line}:") as caught:
        Ignore(rules.encode())
    assert caught.value.code == "dockerfile_invalid"


def test_a_long_file_is_refused() -> None:
    assert not Ignore(b"#" * FILE_BYTES_MAX).ignores("a")
    with pytest.raises(ClocheError, match="longer"):
        Ignore(b"#" * (FILE_BYTES_MAX + 1))
    with pytest.raises(ClocheError, match="characters of patterns"):
        Ignore(b"a" * 60 + b"\n" + b"b\n" * 10_000)


def test_a_directory_above_a_kept_file_is_kept() -> None:
    paths = ["a", "a/b", "a/b/c", "a/x", "d"]
    assert kept(paths, Ignore(b"a\n!a/b/c")) == {"a", "a/b", "a/b/c", "d"}


def test_the_dockerfiles_own_file_comes_first() -> None:
    assert candidates("sub/x.Dockerfile") == ("sub/x.Dockerfile.dockerignore", ".dockerignore")


def test_a_pattern_that_explodes_elsewhere_takes_linear_time() -> None:
    rules = b"**/" + b"*a" * 40 + b"b\n" + b"(a|aa)+" * 20
    name = "a" * 4000
    judge = Ignore(rules)
    started = time.monotonic()
    assert not judge.ignores(name)
    assert time.monotonic() - started < 5, "a backtracking matcher would need more than a lifetime"
