"""The room as the node uses it: who may what, leases and their ends, placeholders, renewals."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from cloche.wire.errors import ClocheError
from cloche_server.secrets.placeholders import PATTERN
from tests.unit.secrets.room import ALICE, BOB, ROOT, VALUE, Room, Server, asked, sandbox_and_lineage, token

FIELD = "data.token"


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    made = Room(tmp_path)
    yield made
    made.secrets.close()


async def wait_until(condition: Callable[[], bool], time_s: float = 10.0) -> None:
    end = time.monotonic() + time_s
    while not condition():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.01)


async def code_of(work: Any) -> str:
    with pytest.raises(ClocheError) as raised:
        await work
    return raised.value.code


async def lease(room: Room, *names: str, owner: str = ALICE.owner, lineage: str | None = None) -> tuple[str, Any]:
    sandbox, fresh = sandbox_and_lineage()
    found = await room.secrets.lease(owner, ALICE.tenant, names, sandbox=sandbox, lineage=lineage or fresh)
    return sandbox, found


@pytest.mark.req("SEC-2")
async def test_what_is_set_is_leased_and_stands_behind_a_placeholder(room: Room) -> None:
    view = await room.secrets.set(ALICE, "TOKEN", asked(methods=["GET"], paths=["/repos/**"], require=True))
    assert (view.name, view.owner, view.source, view.hosts, view.leases) == (
        "TOKEN",
        "uid:1000",
        "value",
        ["api.example.com"],
        0,
    )
    _, (held,) = await lease(room, "TOKEN")
    assert held.value.reveal() == VALUE.encode()
    assert PATTERN.fullmatch(held.placeholder)
    assert (held.hosts, held.methods, held.paths, held.require) == (
        ("api.example.com",),
        ("GET",),
        ("/repos/**",),
        True,
    )
    assert held.places[0].format == "Bearer {}"
    assert (await room.secrets.list(ALICE))[0].leases == 1


async def test_each_sees_and_uses_his_own(room: Room) -> None:
    await room.secrets.set(ALICE, "TOKEN", asked())
    await room.secrets.set(BOB, "TOKEN", asked({"kind": "value", "value": "bobs own value"}))
    assert [view.owner for view in await room.secrets.list(BOB)] == [BOB.owner]
    assert [view.owner for view in await room.secrets.list(ROOT)] == [ALICE.owner, BOB.owner]
    assert (await lease(room, "TOKEN", owner=BOB.owner))[1][0].value.reveal() == b"bobs own value"
    await room.secrets.remove(BOB, "TOKEN")
    assert await code_of(room.secrets.remove(BOB, "TOKEN")) == "secret_not_found"
    assert await code_of(lease(room, "TOKEN", owner=BOB.owner)) == "secret_not_found"
    assert await code_of(room.secrets.remove(ROOT, "TOKEN")) == "secret_not_found"
    assert [view.owner for view in await room.secrets.list(ALICE)] == [ALICE.owner]


async def test_a_missing_one_is_named_and_nothing_is_held(room: Room) -> None:
    await room.secrets.set(ALICE, "TOKEN", asked())
    with pytest.raises(ClocheError, match="OTHER") as raised:
        await lease(room, "TOKEN", "OTHER")
    assert raised.value.detail == {"secret": "OTHER"}
    with pytest.raises(ClocheError, match="OTHER"):
        room.secrets.hosts_of(ALICE.owner, ALICE.tenant, ["TOKEN", "OTHER"])
    assert room.secrets.hosts_of(ALICE.owner, ALICE.tenant, ["TOKEN"]) == ("api.example.com",)
    assert (await room.secrets.list(ALICE))[0].leases == 0


async def test_a_value_that_cannot_be_used_is_refused_without_showing_it(room: Room) -> None:
    with pytest.raises(ClocheError) as raised:
        await room.secrets.set(ALICE, "TOKEN", asked({"kind": "value", "value": "planted\nsecond line"}))
    assert raised.value.code == "invalid_request"
    assert "planted" not in str(raised.value)
    assert await room.secrets.list(ALICE) == []


async def test_files_are_for_their_owner_alone_and_whole(room: Room) -> None:
    await room.secrets.set(ALICE, "TOKEN", asked())
    await lease(room, "TOKEN")
    for path in [room.directory, *room.directory.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert not list(room.directory.rglob("*.new"))


# --- disk -------------------------------------------------------------------------------------------


@pytest.mark.req("SEC-1")
async def test_files_that_were_swapped_do_not_open(room: Room) -> None:
    await room.secrets.set(ALICE, "TOKEN", asked())
    first = set(room.directory.glob("*.sealed"))
    await room.secrets.set(ALICE, "OTHER", asked({"kind": "value", "value": "another value"}, hosts=["evil.example"]))
    (token_file,), (other_file,) = first, set(room.directory.glob("*.sealed")) - first
    mine, other = token_file.read_bytes(), other_file.read_bytes()
    token_file.write_bytes(other)
    assert await code_of(lease(room, "TOKEN")) == "secret_unavailable"
    assert await code_of(room.secrets.list(ALICE)) == "secret_unavailable"
    line, _, sealed = mine.partition(b"\n")
    token_file.write_bytes(line + b"\n" + other.partition(b"\n")[2])
    assert await code_of(lease(room, "TOKEN")) == "secret_unavailable", "the first line is not what counts"
    token_file.write_bytes(line + b"\n" + sealed[:-1])
    assert await code_of(lease(room, "TOKEN")) == "secret_unavailable"
    token_file.write_bytes(b"{}")
    assert await code_of(lease(room, "TOKEN")) == "secret_unavailable"
    token_file.write_bytes(mine)
    assert (await lease(room, "TOKEN"))[1][0].value.reveal() == VALUE.encode()


@pytest.mark.req("SEC-1")
async def test_a_copied_directory_is_unavailable_by_name(room: Room, tmp_path: Path) -> None:
    await room.secrets.set(ALICE, "TOKEN", asked())
    (room.config / "secrets.key").rename(tmp_path / "elsewhere.key")
    room.secrets = room.open()
    with pytest.raises(ClocheError, match="TOKEN") as raised:
        await lease(room, "TOKEN")
    assert raised.value.code == "secret_unavailable"
    assert await code_of(room.secrets.set(ALICE, "NEW", asked())) == "secret_unavailable"
    assert not (room.config / "secrets.key").exists()
    (tmp_path / "elsewhere.key").rename(room.config / "secrets.key")
    assert (await lease(room, "TOKEN"))[1][0].value.reveal() == VALUE.encode()


# --- placeholders -----------------------------------------------------------------------------------


@pytest.mark.req("SEC-2")
async def test_a_lineage_has_one_placeholder_each_also_after_a_restart(room: Room) -> None:
    for name in ("TOKEN", "OTHER"):
        await room.secrets.set(ALICE, name, asked())
    _, lineage = sandbox_and_lineage()
    _, (first,) = await lease(room, "TOKEN", lineage=lineage)
    room.secrets.close()
    room.secrets = room.open()
    _, (again, other) = await lease(room, "TOKEN", "OTHER", lineage=lineage)
    _, (elsewhere,) = await lease(room, "TOKEN")
    assert again.placeholder == first.placeholder
    assert len({again.placeholder, other.placeholder, elsewhere.placeholder}) == 3
    known = room.secrets.placeholders(lineage, ["TOKEN", "OTHER"])
    assert known is not None
    assert known.by_name == {"TOKEN": again.placeholder, "OTHER": other.placeholder}
    room.secrets.forget_lineage(lineage)
    assert (await lease(room, "TOKEN", lineage=lineage))[1][0].placeholder != first.placeholder


# --- the end ----------------------------------------------------------------------------------------


@pytest.mark.req("SEC-4")
async def test_the_end_of_a_sandbox_ends_its_leases_at_once(room: Room) -> None:
    await room.secrets.set(ALICE, "TOKEN", asked())
    sandbox, (held,) = await lease(room, "TOKEN")
    memory = held.value._held
    began = time.monotonic()
    room.secrets.release(sandbox)
    assert room.ended == [sandbox], "the interceptor was told before release returned"
    assert time.monotonic() - began < 1.0
    assert not any(memory), "the value is still in memory"
    assert room.secrets.leases(sandbox) == ()
    room.secrets.release(sandbox)
    assert room.ended == [sandbox]
    assert room.kinds() == ["secret.set", "secret.leased", "secret.released"]


async def test_a_sandbox_that_ends_while_it_is_given_its_secrets_gets_none(room: Room, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    argv = ["/bin/sh", "-c", f"cat {tmp_path / 'gate'}; echo {VALUE}"]
    await room.secrets.set(ROOT, "TOKEN", asked({"kind": "command", "argv": argv}))
    sandbox, lineage = sandbox_and_lineage()
    work = asyncio.ensure_future(
        room.secrets.lease(ROOT.owner, ROOT.tenant, ["TOKEN"], sandbox=sandbox, lineage=lineage)
    )
    gate = await asyncio.to_thread(os.open, tmp_path / "gate", os.O_WRONLY)  # opens when the command reads
    room.secrets.release(sandbox)
    os.close(gate)
    assert await code_of(work) == "sandbox_ended"
    assert room.secrets.leases(sandbox) == ()


async def test_of_two_sources_one_that_fails_leaves_nothing(room: Room) -> None:
    await room.secrets.set(ROOT, "GOOD", asked())
    await room.secrets.set(ROOT, "BAD", asked({"kind": "command", "argv": ["/bin/false"]}))
    sandbox, lineage = sandbox_and_lineage()
    work = room.secrets.lease(ROOT.owner, ROOT.tenant, ["GOOD", "BAD"], sandbox=sandbox, lineage=lineage)
    with pytest.raises(ClocheError, match="BAD"):
        await work
    assert room.secrets.leases(sandbox) == ()
    assert {view.leases for view in await room.secrets.list(ROOT)} == {0}


@pytest.mark.req("SEC-4")
async def test_removing_a_secret_takes_it_from_those_who_hold_it(room: Room) -> None:
    await room.secrets.set(ALICE, "TOKEN", asked())
    sandbox, (held,) = await lease(room, "TOKEN")
    memory = held.value._held
    await room.secrets.remove(ALICE, "TOKEN")
    (told_sandbox, (dead,)) = room.changed[-1]
    assert told_sandbox == sandbox
    assert dead.hosts == (), "it may go nowhere"
    assert dead.placeholder == held.placeholder, "and is still known, so that it is refused everywhere"
    assert dead.value.reveal() != VALUE.encode()
    assert len(dead.value) >= 32, "a short one would be found by chance"
    assert not any(memory)


async def test_setting_it_anew_reaches_those_who_hold_it(room: Room) -> None:
    await room.secrets.set(ALICE, "TOKEN", asked())
    sandbox, (held,) = await lease(room, "TOKEN")
    view = await room.secrets.set(
        ALICE, "TOKEN", asked({"kind": "value", "value": "the next value"}, hosts=["b.example"])
    )
    assert view.leases == 1
    (now,) = room.secrets.leases(sandbox)
    assert (now.value.reveal(), now.hosts, now.placeholder) == (b"the next value", ("b.example",), held.placeholder)
    assert room.changed[-1] == (sandbox, (now,))


# --- minting ----------------------------------------------------------------------------------------


@pytest.mark.req("SEC-4")
async def test_a_minted_value_is_renewed_before_it_ends(room: Room) -> None:
    with Server(token("first value"), token("second value")) as server:
        source = {"kind": "http", "url": server.url, "field": FIELD, "ttl_s": 3.0}
        await room.secrets.set(ROOT, "TOKEN", asked(source))
        sandbox, (held,) = await lease(room, "TOKEN", owner=ROOT.owner)
        assert held.value.reveal() == b"first value"
        ends_at = held.ends_at
        await wait_until(lambda: bool(room.changed))
        assert time.monotonic() < ends_at, "it was renewed after its end"
        (now,) = room.secrets.leases(sandbox)
        assert now.value.reveal() == b"second value"
        assert room.changed[0][1][0].placeholder == held.placeholder
        room.secrets.release(sandbox)
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if sandbox in task.get_name()], "its task goes on"


@pytest.mark.req("SEC-4")
async def test_a_source_that_fails_ends_the_value_at_its_time(room: Room) -> None:
    with Server(token("first value"), (503, b"")) as server:
        source = {"kind": "http", "url": server.url, "field": FIELD, "ttl_s": 2.0}
        await room.secrets.set(ROOT, "TOKEN", asked(source))
        sandbox, (held,) = await lease(room, "TOKEN", owner=ROOT.owner)
        await wait_until(lambda: "secret.not_renewed" in room.kinds())
        assert room.secrets.leases(sandbox)[0].value.reveal() == b"first value", "its time is not over yet"
        await wait_until(lambda: room.secrets.leases(sandbox)[0].is_dead)
        assert time.monotonic() >= held.ends_at
        (dead,) = room.secrets.leases(sandbox)
        assert b"first value" not in dead.value.reveal()
        assert room.changed[-1][1] == (dead,)
        assert len(server.seen) > 2, "it was tried again"


async def test_every_sandbox_has_a_value_of_its_own(room: Room) -> None:
    with Server(token("value of one"), token("value of two")) as server:
        await room.secrets.set(ROOT, "TOKEN", asked({"kind": "http", "url": server.url, "field": FIELD}))
        _, (one,) = await lease(room, "TOKEN", owner=ROOT.owner)
        _, (two,) = await lease(room, "TOKEN", owner=ROOT.owner)
        assert (one.value.reveal(), two.value.reveal()) == (b"value of one", b"value of two")


# --- at the same time -------------------------------------------------------------------------------


async def test_what_is_set_or_removed_during_a_lease_counts(room: Room, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    slow = ["/bin/sh", "-c", f"cat {tmp_path / 'gate'}; echo an old value"]
    await room.secrets.set(ROOT, "TOKEN", asked({"kind": "command", "argv": slow}))
    work = asyncio.ensure_future(lease(room, "TOKEN", owner=ROOT.owner))
    gate = await asyncio.to_thread(os.open, tmp_path / "gate", os.O_WRONLY)
    await room.secrets.set(ROOT, "TOKEN", asked())
    os.close(gate)
    _, (held,) = await work
    assert held.value.reveal() == VALUE.encode()
    await room.secrets.set(ROOT, "TOKEN", asked({"kind": "command", "argv": slow}))
    work = asyncio.ensure_future(lease(room, "TOKEN", owner=ROOT.owner))
    gate = await asyncio.to_thread(os.open, tmp_path / "gate", os.O_WRONLY)
    await room.secrets.remove(ROOT, "TOKEN")
    os.close(gate)
    assert await code_of(work) == "secret_not_found"


async def test_many_writers_of_one_name_leave_one_whole_value(room: Room) -> None:
    values = [f"value number {number}" for number in range(20)]
    await asyncio.gather(
        *(room.secrets.set(ALICE, "TOKEN", asked({"kind": "value", "value": each})) for each in values)
    )
    _, (held,) = await lease(room, "TOKEN")
    assert held.value.reveal().decode() in values
    assert len(await room.secrets.list(ALICE)) == 1
