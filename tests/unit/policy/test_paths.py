"""Paths: what is refused because servers read it in two ways, and what patterns match."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.policy.paths import BadPattern, compiled, covers, refused, split


def match(pattern: str, path: str) -> bool:
    assert refused(path) is None
    return compiled(pattern).matches(split(path))


@pytest.mark.req("NET-3")
@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("/", "/", True),
        ("/", "/a", False),
        ("/a", "/a", True),
        ("/a", "/a/", False),
        ("/a", "/A", False),
        ("/a/", "/a/", True),
        ("/*", "/a", True),
        ("/*", "/", True),
        ("/*", "/a/b", False),
        ("/a/*/c", "/a/b/c", True),
        ("/a/*/c", "/a/b/b/c", False),
        ("/v*/x", "/v1/x", True),
        ("/v*/x", "/w1/x", False),
        ("/a*b*c", "/a1b2c", True),
        ("/a*b*c", "/abcb", False),
        ("/a*bb", "/abab", False),
        ("/a*bb", "/abbb", True),
        ("/**", "/", True),
        ("/**", "/a/b/c", True),
        ("/repos/**", "/repos/a/b", True),
        ("/repos/**", "/repos/", True),
        ("/repos/**", "/repos", False),
        ("/repos/**", "/reposx/a", False),
        ("/a/**/z", "/a/z", True),
        ("/a/**/z", "/a/b/c/z", True),
        ("/a/**/z", "/a/b/c/y", False),
        ("/**/b/**", "/x/b", False),
        ("/**/b/**", "/x/b/c", True),
        ("/**/b/**", "/b/b/c", True),
        ("/**/a/*/c", "/a/a/b/c", True),
        ("/a:b", "/a%3Ab", True),
        ("/a%3ab", "/a:b", True),
        ("/caf%C3%A9", "/caf%c3%a9", True),
        ("/@x/*", "/%40x/y", True),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert match(pattern, path) is expected


@pytest.mark.req("NET-3")
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/a/../b", "dot segment"),
        ("/..", "dot segment"),
        ("/a/./b", "dot segment"),
        ("/a/.", "dot segment"),
        ("/a/%2e%2e/b", "encoded letter, digit or dot"),
        ("/a/.%2e/b", "encoded letter, digit or dot"),
        ("/%61dmin", "encoded letter, digit or dot"),
        ("/a%2fb", "encoded slash"),
        ("/a%2Fb", "encoded slash"),
        ("/a\\b", "backslash"),
        ("/a%5cb", "encoded backslash"),
        ("/a%252fb", "double encoding"),
        ("/a%25", "double encoding"),
        ("/a%", "no escape"),
        ("/a%4", "no escape"),
        ("/a%zz", "no escape"),
        ("/a%u002f", "no escape"),
        ("/a%00", "control"),
        ("/a%0d%0ab", "control"),
        ("/a%7f", "control"),
        ("/a\x00", "control"),
        ("/a b", "blank"),
        ("/ä", "beyond ASCII"),
        ("//a", "empty segment"),
        ("/a//b", "empty segment"),
        ("/a;x=1/b", "? # ;"),
        ("/..;/b", "? # ;"),
        ("/a%3bb", "? # or ;"),
        ("/a%3fb", "? # or ;"),
        ("/a#b", "? # ;"),
        ("a", "no /"),
        ("*", "no /"),
        ("", "no /"),
        ("/" + "a" * 9000, "too many"),
        ("/a" * 300, "too many"),
    ],
)
def test_doubtful_paths_are_refused(path: str, why: str) -> None:
    assert why in (refused(path) or "")


@pytest.mark.parametrize(
    "pattern", ["a", "", "/a**", "/**b/c", "/a?b", "/a/../b", "/a%2fb", "/a//b", "/*" * 17, "/" + "x" * 9000]
)
def test_bad_patterns(pattern: str) -> None:
    with pytest.raises(BadPattern):
        compiled(pattern)


@given(
    st.lists(st.text(alphabet="ab", max_size=3), min_size=1, max_size=6),
    st.lists(st.sampled_from(["a", "*", "**", "b*", "*a"]), min_size=1, max_size=5),
)
def test_against_a_slow_but_plain_matcher(parts: list[str], pattern: list[str]) -> None:
    def plain(pattern: list[str], parts: list[str]) -> bool:
        if not pattern:
            return not parts
        if pattern[0] == "**":
            least = 1 if len(pattern) == 1 else 0
            return any(plain(pattern[1:], parts[count:]) for count in range(least, len(parts) + 1))
        return bool(parts) and segment(pattern[0], parts[0]) and plain(pattern[1:], parts[1:])

    def segment(pattern: str, text: str) -> bool:
        if not pattern:
            return not text
        if pattern[0] == "*":
            return any(segment(pattern[1:], text[count:]) for count in range(len(text) + 1))
        return text[:1] == pattern[0] and segment(pattern[1:], text[1:])

    assert compiled("/" + "/".join(pattern)).matches(parts) is plain(pattern, parts)


@pytest.mark.parametrize(("stars", "chars"), [(3, 600), (7, 4000), (14, 8000)])
def test_no_path_takes_long(stars: int, chars: int) -> None:
    """Tried again and again, each star would multiply the time by the length."""
    pattern = compiled("/**/" + "*a" * stars + "b")
    path = split("/" + "a" * chars + "/" + "a" * (chars // 2))
    started = time.perf_counter()
    for _ in range(20):
        assert not pattern.matches(path)
    assert time.perf_counter() - started < 1


@pytest.mark.req("POL-1")
@pytest.mark.parametrize(
    ("wide", "narrow", "expected"),
    [
        ("/a/**", "/a/**", True),
        ("/a/**", "/a/b/**", True),
        ("/a/**", "/a/b", True),
        ("/**", "/a/*", True),
        ("/a/*", "/a/b", True),
        ("/a/*", "/a/b/c", False),
        ("/a/*", "/a/**", False),
        ("/a/**", "/ab", False),
        ("/a/**", "/a", False),
        ("/a/b", "/a/*", False),
        ("/*/b/**", "/x/b/*", False),  # true, but not seen: on the safe side
    ],
)
def test_covers(wide: str, narrow: str, expected: bool) -> None:
    assert covers(wide, narrow) is expected
