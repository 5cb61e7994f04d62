"""Every message gets a typed request or a `Refusal`, never another exception."""

from __future__ import annotations

import copy
import json
import random
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloche_server.keeper.verbs import (
    MESSAGE_BYTES_MAX,
    Adopt,
    Attach,
    Boot,
    Hello,
    Kill,
    List,
    Refusal,
    Seal,
    Stop,
    answer,
    parse,
    refusal,
)
from tests.unit.keeper.harness import spec

pytestmark = [pytest.mark.req("ISO-7")]

ID = "s" + "a" * 19
GOOD: list[tuple[dict[str, Any], type]] = [
    ({"verb": "hello", "generation": 1}, Hello),
    ({"verb": "boot", "spec": json.loads(spec().to_json())}, Boot),
    ({"verb": "list", "after": ""}, List),
    ({"verb": "list", "after": ID}, List),
    ({"verb": "attach", "sandbox": ID}, Attach),
    ({"verb": "adopt", "sandbox": ID}, Adopt),
    ({"verb": "seal", "sandbox": ID}, Seal),
    ({"verb": "kill", "sandbox": ID}, Kill),
    ({"verb": "stop", "purge": False}, Stop),
]


def encode(message: Any) -> bytes:
    return json.dumps(message).encode()


def refused(data: bytes, descriptors: int = 0) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(data, descriptors)
    return caught.value


@pytest.mark.parametrize(("message", "kind"), GOOD)
def test_each_verb_is_understood(message: dict[str, Any], kind: type) -> None:
    request = parse(encode({"id": 7, **message}), 1 if kind is Adopt else 0)
    assert type(request) is kind
    assert request.request == 7


@pytest.mark.parametrize(("message", "kind"), GOOD)
def test_one_field_more_or_less_is_refused(message: dict[str, Any], kind: type) -> None:
    count = 1 if kind is Adopt else 0
    assert refused(encode({"id": 1, **message, "uid": 0}), count).code == "malformed"
    for name in message:
        less = {"id": 1, **message}
        del less[name]
        assert refused(encode(less), count).code in ("malformed", "unknown_verb")


@pytest.mark.parametrize(("message", "kind"), GOOD)
def test_wrong_descriptors_are_refused(message: dict[str, Any], kind: type) -> None:
    wrong = 0 if kind is Adopt else 1
    assert refused(encode({"id": 1, **message}), wrong).code == "wrong_descriptors"


@pytest.mark.parametrize(
    "image",
    [
        "../python.erofs",
        "/etc/passwd",
        "a/../../b",
        ".",
        "..",
        "",
        "a\x00b",
        "a b",
        "x" * 200,
        "A.erofs",
        "a/b",
        "roots/",
        "roots/../python.erofs",
        "roots/a/b",
        "roots//a",
        "images/a",
        7,
        None,
    ],
)
def test_no_path_leaves_the_images(image: Any) -> None:
    message = {"id": 1, "verb": "boot", "spec": {**json.loads(spec().to_json()), "image_file": image}}
    assert refused(encode(message)).code == "bad_spec"


def test_an_image_is_a_file_or_a_root_of_the_store() -> None:
    for image in ("python.erofs", "roots/" + "0" * 64 + ".erofs"):
        message = {"id": 1, "verb": "boot", "spec": {**json.loads(spec().to_json()), "image_file": image}}
        assert type(parse(encode(message))) is Boot


def test_a_converter_has_no_image() -> None:
    for image, fits in (("", True), ("python.erofs", False), (None, False), (0, False)):
        message = {"id": 1, "verb": "boot", "spec": {**json.loads(spec("converter").to_json()), "image_file": image}}
        if fits:
            assert type(parse(encode(message))) is Boot
        else:
            assert refused(encode(message)).code == "bad_spec"


@pytest.mark.parametrize(
    "name", ["../x", "S" + "a" * 19, "s" + "a" * 18, "s" + "a" * 20, "", "s/" + "a" * 18, 1, None, []]
)
def test_no_id_is_a_path(name: Any) -> None:
    assert refused(encode({"id": 1, "verb": "kill", "sandbox": name})).code == "malformed"
    message = {"id": 1, "verb": "boot", "spec": {**json.loads(spec().to_json()), "id": name}}
    assert refused(encode(message)).code == "bad_spec"


@pytest.mark.parametrize(
    "field",
    [
        ("cpus", "1"),
        ("cpus", True),
        ("memory_bytes", 1e9),
        ("memory_bytes", -1),
        ("processes", 0),
        ("disk_bytes", 1 << 60),
    ],
)
def test_numbers_are_bounded(field: tuple[str, Any]) -> None:
    message = {"id": 1, "verb": "boot", "spec": {**json.loads(spec().to_json()), field[0]: field[1]}}
    assert refused(encode(message)).code == "bad_spec"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"7", b'"x"', b"[" * 60000, b'{"id":1,' * 5000, b"\xff\xfe", b'{"id":NaN,"verb":"list"}',
     b'{"id":1,"id":2,"verb":"list","after":""}', b"9" * 60000, b'{"id":true,"verb":"list","after":""}', b'{"id":-1}'],
)  # fmt: skip
def test_what_is_no_message_is_refused(data: bytes) -> None:
    assert refused(data).code == "malformed"


def test_too_long_is_refused() -> None:
    assert refused(b" " * (MESSAGE_BYTES_MAX + 1)).code == "too_large"


def test_answers_name_their_request() -> None:
    assert json.loads(answer(3, {"a": 1})) == {"id": 3, "ok": {"a": 1}}
    assert json.loads(refusal(Refusal("busy", "no", 4))) == {"id": 4, "error": {"code": "busy", "message": "no"}}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@given(data=st.binary(max_size=300) | JSON.map(encode), descriptors=st.integers(0, 4))
@settings(max_examples=1000, deadline=None)
def test_anything_is_a_request_or_a_refusal(data: bytes, descriptors: int) -> None:
    with suppress(Refusal):
        parse(data, descriptors)


def mutated(random_: random.Random) -> bytes:
    """A good message, damaged in one to four ways."""
    message: Any = {"id": random_.randrange(1 << 20), **json.loads(json.dumps(random_.choice(GOOD)[0]))}
    odd: list[Any] = [None, True, -1, 1 << 70, 1e308, "", "../../etc", "\u202e", "s" * 70, [], {}, [[]], {"a": {}}]
    for _ in range(random_.randint(1, 4)):
        target = message["spec"] if isinstance(message.get("spec"), dict) and random_.random() < 0.6 else message
        name = random_.choice([*target, "verb", "id", "spec", "sandbox", "extra"])
        if random_.random() < 0.2:
            target.pop(name, None)
        else:
            target[name] = copy.deepcopy(random_.choice(odd))
    data = bytearray(encode(message))
    for _ in range(random_.choice((0, 0, 1, 3))):
        data[random_.randrange(len(data))] = random_.randrange(256)
    if random_.random() < 0.1:
        del data[random_.randrange(len(data)) :]
    return bytes(data)


def test_damaged_messages_never_raise_anything_else(seed: int, long_run: bool) -> None:
    random_ = random.Random(seed)
    for _ in range(100_000 if long_run else 10_000):
        data = mutated(random_)
        with suppress(Refusal):
            request = parse(data, random_.choice((0, 0, 0, 1, 2)))
            assert 0 <= request.request < 1 << 53
