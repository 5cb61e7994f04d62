"""Pure: a stream is replaced as the whole would be, wherever its chunks end."""

from __future__ import annotations

import re
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.interceptor.redact import Replacer


def whole(pairs: dict[bytes, bytes], text: bytes) -> bytes:
    """What a single pass does: leftmost, then longest. Another implementation, to compare with."""
    if not pairs:
        return text
    pattern = b"|".join(re.escape(old) for old in sorted(pairs, key=len, reverse=True))
    return re.sub(pattern, lambda found: pairs[found[0]], text)


def streamed(pairs: dict[bytes, bytes], chunks: list[bytes]) -> bytes:
    replacer = Replacer(pairs.items())
    return b"".join(map(replacer.feed, chunks)) + replacer.flush()


OVERLAPPING = [
    {b"secret": b"S"},
    {b"abc": b"1", b"abcdef": b"2", b"cde": b"3", b"def": b"4"},
    {b"aaaa": b"X", b"aa": b"y"},
    {b"xab": b"1", b"abc": b"2", b"bcx": b"3", b"ab": b"4"},
    {b"abab": b"1", b"babb": b"22222", b"bb": b""},
    {b"a": b"aa", b"aaaaaaaa": b"!"},
]
TEXTS = [
    b"xxsecretsecsecretrets",
    b"abcabcdefcdefabcde",
    b"aaaaaaabaaaaa",
    b"xabcxabxabbcx",
    b"ababbabbabab",
    b"aaaaaaaaaaaaaaa",
]


@pytest.mark.req("SEC-3")
@pytest.mark.parametrize("pairs", OVERLAPPING)
@pytest.mark.parametrize("text", TEXTS)
def test_every_border_and_every_two_borders_give_the_same(pairs: dict[bytes, bytes], text: bytes) -> None:
    right = whole(pairs, text)
    assert streamed(pairs, [text]) == right
    assert streamed(pairs, [bytes([byte]) for byte in text]) == right
    for first, second in combinations(range(len(text) + 1), 2):
        assert streamed(pairs, [text[:first], text[first:second], text[second:]]) == right


_LETTERS = st.lists(st.sampled_from(b"ab"), max_size=60).map(bytes)


@pytest.mark.req("SEC-3")
@given(
    st.dictionaries(
        st.lists(st.sampled_from(b"ab"), min_size=1, max_size=9).map(bytes), st.binary(max_size=3), max_size=5
    ),
    st.lists(_LETTERS, max_size=8),
)
def test_any_texts_and_any_chunks(pairs: dict[bytes, bytes], chunks: list[bytes]) -> None:
    assert streamed(pairs, chunks) == whole(pairs, b"".join(chunks))


@given(
    st.lists(st.binary(max_size=200), max_size=8),
    st.binary(min_size=8, max_size=300).filter(lambda value: b"x" not in value),
)
def test_a_value_never_comes_through(chunks: list[bytes], value: bytes) -> None:
    text = b"".join(chunks) + value + b"".join(chunks)
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    out = streamed({value: b"x" * len(value)}, pieces)
    assert len(out) == len(text)
    assert value not in out


def test_only_what_may_be_a_beginning_is_held_back() -> None:
    replacer = Replacer([(b"secret-value", b"*")])
    assert replacer.feed(b'data: {"token": "hello"}\n\n') == b'data: {"token": "hello"}\n\n'
    assert replacer.feed(b"so far: secret-") == b"so far: "
    assert replacer.feed(b"service") == b"secret-service"
    assert replacer.flush() == b""


def test_long_values_and_many_matches_take_no_quadratic_time() -> None:
    value = b"k" * 60_000 + b"!"
    replacer = Replacer([(value, b"v"), (b"zz", b"y")])
    out = b"".join(replacer.feed(b"k" * 65_536) for _ in range(20))
    out += replacer.feed(b"!" + b"z" * 200_000) + replacer.flush()
    assert out.endswith(b"v" + b"y" * 100_000)
