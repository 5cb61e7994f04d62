"""Guest-chosen text cannot act on the terminal that shows it."""

import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche.cli.escape import StreamEscaper, escape, line
from cloche.cli.render import table_lines

pytestmark = pytest.mark.req("UX-6")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text 42", "plain text 42"),
        ("Grüße, 日本語, 🎉", "Grüße, 日本語, 🎉"),
        ("\x1b]52;c;cm0gLXJmIH4=\x07", "\\x1b]52;c;cm0gLXJmIH4=\\x07"),  # OSC 52: sets the clipboard
        ("\x1b]0;title\x1b\\", "\\x1b]0;title\\x1b\\"),
        ("\x1b[2J\x1b[H", "\\x1b[2J\\x1b[H"),
        ("\x9b31m", "\\x9b31m"),  # CSI as one C1 character
        ("\x9d52;c;x\x9c", "\\x9d52;c;x\\x9c"),
        ("a\nb\rc\td\x00e\x7f", "a\\nb\\rc\\td\\x00e\\x7f"),
        ("user\u202egnp.exe", "user⟦U+202E⟧gnp.exe"),
        ("\u2066a\u2069", "⟦U+2066⟧a⟦U+2069⟧"),
        ("zero\u200bwidth\ufeff", "zero⟦U+200B⟧width⟦U+FEFF⟧"),
        ("tag\U000e0041", "tag⟦U+E0041⟧"),
        ("vs\ufe01\U000e0101", "vs⟦U+FE01⟧⟦U+E0101⟧"),
        ("line\u2028sep", "line⟦U+2028⟧sep"),
        ("a\u00a0b", "a\\xa0b"),
        ("hangul\u3164", "hangul⟦U+3164⟧"),
        ("bad\udc80byte", "bad\\x80byte"),
        ("lone\ud800", "lone⟦U+D800⟧"),
    ],
)
def test_what_would_act_is_shown(text: str, shown: str) -> None:
    assert escape(text) == shown


def test_marks_do_not_climb_over_other_lines() -> None:
    shown = escape("e" + "\u0301" * 40)
    assert shown.count("\u0301") == 4
    assert shown.count("⟦U+0301⟧") == 36


@given(st.text())
def test_nothing_dangerous_is_left(text: str) -> None:
    for char in escape(text):
        assert unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"), hex(ord(char))


@given(st.text(), st.integers(min_value=2, max_value=40))
def test_a_line_has_its_length(text: str, width_max: int) -> None:
    assert len(line(text, width_max)) <= width_max


def test_a_table_escapes_every_cell() -> None:
    lines = table_lines(["ID", "NAME"], [["s1", "\x1b]52;c;x\x07"], ["s2", "a\nb"]])
    assert lines == ["ID  NAME", "s1  \\x1b]52;c;x\\x07", "s2  a\\nb"]


@given(st.binary(), st.lists(st.integers(min_value=0, max_value=400), max_size=6))
def test_a_stream_in_pieces_shows_the_same(data: bytes, cuts: list[int]) -> None:
    whole = StreamEscaper().feed(data, final=True)
    pieces = StreamEscaper()
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    shown = "".join(pieces.feed(data[a:b]) for a, b in pairwise(bounds))
    assert shown + pieces.feed(b"", final=True) == whole


def test_a_stream_keeps_lines_and_escapes_the_rest() -> None:
    escaper = StreamEscaper()
    assert escaper.feed(b"one\r") == "one"
    assert escaper.feed(b"\ntwo\x1b]52;c;x\x07\tthree\xff\n") == "\ntwo\\x1b]52;c;x\\x07\tthree\\xff\n"
    assert escaper.feed(b"50 %\r100 %\n", final=True) == "50 %\\r100 %\n"
