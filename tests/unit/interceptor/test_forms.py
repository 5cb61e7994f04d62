"""Pure: each way to write a text is seen, and nothing else."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloche_server.interceptor.forms import Sight, forms, value_forms, views

PLACEHOLDER = "cloche_ph_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0fX"
OTHER = "cloche_ph_" + "ZZ3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0fX"


def _each(pattern: str, text: str) -> str:
    return "".join(pattern % ord(char) for char in text)


WRITTEN = {
    "raw": PLACEHOLDER,
    "lower": PLACEHOLDER.lower(),
    "upper": PLACEHOLDER.upper(),
    "base64 at 0": base64.b64encode(PLACEHOLDER.encode()).decode(),
    "base64 at 1": base64.b64encode(b"u" + PLACEHOLDER.encode() + b"tail").decode(),
    "base64 at 2": base64.b64encode(b"u:" + PLACEHOLDER.encode() + b"!").decode(),
    "base64 for URLs": base64.urlsafe_b64encode(b"\xfb\xff" + PLACEHOLDER.encode()).decode(),
    "base64 in lines": "\r\n".join(base64.encodebytes(b"x" * 40 + PLACEHOLDER.encode()).decode().split("\n")),
    "hex": PLACEHOLDER.encode().hex(),
    "HEX": PLACEHOLDER.encode().hex().upper(),
    "percent": _each("%%%02x", PLACEHOLDER),
    "percent, some": PLACEHOLDER.replace("c", "%63").replace("_", "%5F"),
    "percent twice": quote(_each("%%%02X", PLACEHOLDER)),
    "JSON escapes": _each("\\u%04x", PLACEHOLDER),
    "some JSON escapes": PLACEHOLDER.replace("p", "\\u0070"),
    "base64 in percent": quote(base64.b64encode(PLACEHOLDER.encode() + b"\xff\xfe").decode(), safe=""),
}


@pytest.mark.req("SEC-3")
@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.parametrize("around", [("", ""), ("x=1&y=", "&z=2"), ('{"k": "', '"}')])
def test_a_placeholder_is_seen_however_it_is_written(how: str, around: tuple[str, str]) -> None:
    sight = Sight({"OTHER": OTHER.encode(), "TOKEN": PLACEHOLDER.encode()})
    assert sight.find((around[0] + WRITTEN[how] + around[1]).encode()) == "TOKEN"


@given(st.binary(max_size=400))
def test_what_holds_no_placeholder_is_not_taken_for_one(text: bytes) -> None:
    assert Sight({"TOKEN": PLACEHOLDER.encode()}).find(text) is None


def test_a_placeholder_that_is_nearly_right_is_not_seen() -> None:
    sight = Sight({"TOKEN": PLACEHOLDER.encode()})
    assert sight.find(PLACEHOLDER[:-1].encode()) is None
    assert sight.find(OTHER.encode()) is None
    assert Sight({}).find(PLACEHOLDER.encode()) is None


@given(st.binary(min_size=8, max_size=40), st.binary(max_size=5), st.binary(max_size=5))
def test_base64_of_a_value_is_among_its_forms_at_every_alignment(value: bytes, before: bytes, after: bytes) -> None:
    coded = base64.b64encode(before + value + after)
    assert any(form in coded for form in value_forms(value))
    urlsafe = base64.urlsafe_b64encode(before + value + after)
    assert any(form in urlsafe for form in value_forms(value))


@given(st.text(min_size=8, max_size=40))
def test_percent_and_json_of_a_value_are_among_its_forms(value: str) -> None:
    raw = value.encode("utf-8", "surrogatepass")
    for written in (quote(raw), quote(raw, safe=""), json.dumps(value)[1:-1], raw.hex()):
        assert any(form in written.encode() for form in value_forms(raw))


def test_forms_are_for_the_gate_too() -> None:
    assert forms(PLACEHOLDER)[0] == PLACEHOLDER.encode()
    assert all(len(form) >= 40 for form in forms(PLACEHOLDER))


@given(st.binary(max_size=2000))
def test_views_are_few_and_not_longer(text: bytes) -> None:
    found = list(views(text))
    assert 1 <= len(found) <= 5
    assert all(len(view) <= len(text) for view in found)
