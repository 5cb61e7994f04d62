from __future__ import annotations

import copy
import logging
import pickle
import traceback

import pytest

from cloche_server.secrets.hidden import Hidden

PLANTED = "planted-value-1234"


@pytest.mark.req("SEC-1")
def test_nothing_that_shows_an_object_shows_the_value(caplog: pytest.LogCaptureFixture) -> None:
    value = Hidden(PLANTED.encode())
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").error("value %s %r", value, [value])
    try:
        raise ValueError(value, {"held": value})
    except ValueError:
        trace = traceback.format_exc()
    shown = [
        str(value),
        repr(value),
        f"{value}",
        f"{value!r:>50}",
        repr({"a": value}),
        caplog.text,
        trace,
    ]
    assert not [text for text in shown if PLANTED in text]
    assert PLANTED in f"{value.reveal()!r}", "the same look finds it where it is"


def test_it_is_not_pickled_copied_or_hashed() -> None:
    value = Hidden(b"x" * 8)
    for act in (pickle.dumps, copy.copy, copy.deepcopy, hash):
        with pytest.raises(TypeError):
            act(value)


def test_wiped_it_is_gone_and_says_so() -> None:
    value = Hidden(b"planted")
    held = value._held
    value.wipe()
    assert held == bytes(7), "the memory itself is zeroed"
    with pytest.raises(RuntimeError):
        value.reveal()
    value.wipe()
    assert value != Hidden(bytes(7))


def test_two_of_the_same_are_equal() -> None:
    assert Hidden(b"a") == Hidden(b"a")
    assert Hidden(b"a") != Hidden(b"b")
    assert Hidden(b"a") != b"a"
