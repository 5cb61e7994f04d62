"""Variables in Dockerfiles. The tables are what BuildKit v0.20.2's shell lexer answers."""

import pytest

from cloche_server.images.build.expand import (
    DEPTH_MAX,
    RESULT_CHARS_MAX,
    BadExpansion,
    UnsupportedExpansion,
    expand,
    expand_document,
    words,
)

ENV = {"X": "val", "E": "", "S": "a b"}
WORDS = [
    ("$X", "val"),
    ("${X}", "val"),
    ("a$X.b", "aval.b"),
    ("a${X}b", "avalb"),
    ("$X_y", ""),
    ("${U:-d}", "d"),
    ("${U-d}", "d"),
    ("${E:-d}", "d"),
    ("${E-d}", ""),
    ("${X:+y}", "y"),
    ("${E:+y}", ""),
    ("${E+y}", "y"),
    ("${U+y}", ""),
    ("'$X'", "$X"),
    ('"$X"', "val"),
    ('"a\\"b"', 'a"b'),
    ('"a\\$X"', "a$X"),
    ('"a\\nb"', "a\\nb"),
    ("\\$X", "$X"),
    ("a\\ b", "a b"),
    ("a\\", "a"),
    ("\\\\", "\\"),
    ("$", "$"),
    ("$$", ""),
    ("$1x", "x"),
    ("${U:-${X}}", "val"),
    ("${U:-'q $X'}", "q $X"),
    ('${U:-"q $X"}', "q val"),
    ("${U:-a}b}", "ab}"),
    ("${X:-a\\}b}", "val"),
    ("${X:?no}", "val"),
    ("$S", "a b"),
    ('a"b c"d', "ab cd"),
    ("a'b\"c'd", 'ab"cd'),
    ("\\n", "n"),
]
SPLIT = [
    ("a  b", ["a", "b"]),
    ("$S c", ["a", "b", "c"]),
    ("'a b' c", ["a b", "c"]),
    ('"$S" c', ["a b", "c"]),
    ("a\\ b c", ["a b", "c"]),
    ("", []),
    ("$E", []),
    ("${U:-x y}", ["x", "y"]),
]
DOCUMENTS = [
    ("say \"$X\" '$X'", "say \"val\" 'val'"),
    ("a\\nb", "anb"),
    ("\\$X", "$X"),
    ("$U.", "."),
]
BAD = ["${", "${}", "${X", "${X:", "${X:-", "'a", '"a', "${U:?no}", "${U?}", "${E:?}", "${X^}", "${:a}", "${{a}}"]


@pytest.mark.req("IMG-2")
@pytest.mark.parametrize(("word", "result"), WORDS)
def test_a_word_is_expanded_as_by_buildkit(word: str, result: str) -> None:
    assert expand(word, ENV) == result


@pytest.mark.parametrize(("text", "result"), SPLIT)
def test_words_split_at_unquoted_spaces(text: str, result: list[str]) -> None:
    assert words(text, ENV) == result


@pytest.mark.parametrize(("text", "result"), DOCUMENTS)
def test_a_heredoc_keeps_its_quotes(text: str, result: str) -> None:
    assert expand_document(text, ENV) == result


@pytest.mark.parametrize("word", BAD)
def test_what_buildkit_refuses_is_refused(word: str) -> None:
    with pytest.raises(BadExpansion):
        expand(word, ENV)


@pytest.mark.parametrize("word", ["${X#a}", "${X%%a}", "${X/a/b}"])
def test_patterns_are_refused_by_name(word: str) -> None:
    with pytest.raises(UnsupportedExpansion, match=r"\$\{X[#%/]"):
        expand(word, ENV)


def test_the_escape_character_is_the_files_own() -> None:
    assert expand("`$X \\$X", ENV, "`") == "$X \\val"


def test_values_that_double_end_at_a_limit() -> None:
    env = {"A": "x" * (RESULT_CHARS_MAX // 2)}
    assert len(expand("$A$A", env)) == RESULT_CHARS_MAX
    with pytest.raises(BadExpansion, match="longer"):
        expand("$A$A.", env)


def test_nesting_has_a_limit() -> None:
    def nested(depth: int) -> str:
        return "${U:-" * depth + "x" + "}" * depth

    assert expand(nested(DEPTH_MAX - 1), {}) == "x"
    with pytest.raises(BadExpansion, match="deeper"):
        expand(nested(DEPTH_MAX), {})
