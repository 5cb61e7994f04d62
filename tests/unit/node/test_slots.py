"""Slots: the lowest free one, given back only by whoever holds it."""

import pytest

from cloche_server.node.slots import FIRST, NONE, SLOT_MAX, Slots

pytestmark = pytest.mark.req("NET-6")


def test_a_command_alone_has_the_first_one() -> None:
    slots = Slots()
    for name in ("a", "b", "c"):
        assert slots.next() == FIRST
        slots.hold(FIRST, name)
        assert slots.command_of(FIRST) == name
        slots.free(FIRST, name)
    assert slots.command_of(FIRST) is None


def test_the_lowest_free_one_is_given() -> None:
    slots = Slots()
    for number in range(1, 6):
        slots.hold(slots.next(), f"c{number}")
    slots.free(2, "c2")
    slots.free(4, "c4")
    assert slots.next() == 2
    slots.hold(2, "new")
    assert slots.next() == 4
    assert [slots.command_of(slot) for slot in range(1, 6)] == ["c1", "new", "c3", None, "c5"]


def test_when_none_is_left_nobody_loses_his() -> None:
    slots = Slots()
    for number in range(SLOT_MAX):
        slots.hold(slots.next(), f"c{number}")
    assert slots.next() == NONE
    slots.hold(NONE, "late")
    assert slots.command_of(NONE) is None
    slots.free(NONE, "late")
    assert slots.command_of(1) == "c0"


def test_only_its_holder_frees_it() -> None:
    slots = Slots()
    slots.hold(1, "first")
    slots.free(1, "other")
    assert slots.command_of(1) == "first"


def test_without_a_slot_the_only_command_is_meant() -> None:
    slots = Slots()
    assert slots.command_of(NONE) is None
    slots.hold(1, "only")
    assert slots.command_of(NONE) == "only"
    slots.hold(2, "other")
    assert slots.command_of(NONE) is None
    assert slots.command_of(99) is None
