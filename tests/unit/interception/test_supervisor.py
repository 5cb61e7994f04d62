"""Which process is there when, and what it is told: again after its death, only what lives, nothing twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloche.wire.errors import ClocheError
from cloche.wire.secrets import Place
from cloche_server.egress.interception import authority, supervisor
from cloche_server.egress.interception.environment import Environment
from cloche_server.egress.interception.supervisor import Interception
from cloche_server.secrets.hidden import Hidden
from cloche_server.secrets.leases import Lease
from tests.unit.interception.parts import WHO, GateSide, PlainBox, Ready, Starter, received, target

pytestmark = [pytest.mark.req("NET-9"), pytest.mark.req("SEC-1")]
OTHER = replace(WHO, sandbox="s" + "1" * 19)
STRANGER = replace(WHO, sandbox="s" + "2" * 19, tenant="t" + "z" * 19, lineage="l" + "2" * 19)
VALUE = b"real-value-of-the-secret"


def lease(name: str = "TOKEN", value: bytes = VALUE) -> Lease:
    place = Place(kind="header", name="authorization", format="Bearer {}")
    return Lease(name, f"cloche_ph_{name:x<32}", Hidden(value), ("api.example",), ("GET",), None, (place,), True)


class Held:
    def __init__(self, interception: Interception, starter: Starter) -> None:
        self.interception = interception
        self.starter = starter

    async def open(self, host: str, who: Any = WHO) -> tuple[GateSide, Any]:
        gate = GateSide()
        if who.sandbox not in self.interception._sandboxes:
            self.interception.sandbox(who, [])
        return gate, await self.interception.open(gate, who, target(host), tls=True, rule="egress[0]")

    async def told(self, who: Any = WHO) -> dict[str, Any]:
        """What the process knows."""
        _, end = await self.open("tell.test", who)
        found: dict[str, Any] = json.loads(await received(end))
        end.close()
        return found


Maker = Callable[..., Held]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Maker]:
    made: list[Interception] = []

    def one(**more: Any) -> Held:
        starter = more.pop("start", None) or Starter()
        more = {"environment": Ready(), "box": PlainBox(), **more}
        made.append(Interception(directory=tmp_path, start=starter, **more))
        return Held(made[-1], starter)

    yield one
    for each in made:
        await each.close()


async def test_started_at_first_need_and_once(make: Maker) -> None:
    held = make()
    assert held.starter.started == []
    await asyncio.gather(*(held.open("echo.test") for _ in range(20)))
    assert held.starter.asked == [(WHO.tenant, "3.13-" + "0" * 64)]


async def test_one_process_for_each_tenant_and_neither_knows_the_others(make: Maker) -> None:
    held = make()
    held.interception.sandbox(WHO, [lease()])
    held.interception.sandbox(STRANGER, [lease("OTHER", b"another-tenants-value")])
    mine, theirs = await held.told(), await held.told(STRANGER)
    assert [tenant for tenant, _ in held.starter.asked] == [WHO.tenant, STRANGER.tenant]
    assert list(mine["sandboxes"]) == [WHO.sandbox]
    assert list(theirs["sandboxes"]) == [STRANGER.sandbox]
    assert (mine["authorities"], theirs["authorities"]) == ([WHO.lineage], [STRANGER.lineage])


async def test_what_a_lease_says_is_told(make: Maker) -> None:
    held = make()
    held.interception.sandbox(WHO, [lease()])
    [told] = (await held.told())["sandboxes"][WHO.sandbox]
    assert told == {
        "name": "TOKEN",
        "placeholder": "cloche_ph_" + "TOKEN".ljust(32, "x"),
        "value": "cmVhbC12YWx1ZS1vZi10aGUtc2VjcmV0",
        "hosts": ["api.example"],
        "methods": ["GET"],
        "paths": None,
        "places": [{"kind": "header", "name": "authorization", "format": "Bearer {}"}],
        "require": True,
    }


async def test_a_new_process_is_told_everything_again(make: Maker) -> None:
    held = make()
    held.interception.sandbox(WHO, [lease()])
    held.interception.sandbox(OTHER, [lease("OTHER")])
    before = await held.told()
    assert list(before["sandboxes"]) == [WHO.sandbox], "the other had no connection through it"
    assert before["trust"] > 50
    gate, end = await held.open("echo.test")
    os.kill(held.starter.started[0].pid, signal.SIGKILL)
    async with asyncio.timeout(1):
        await gate.over.wait()
        assert await received(end) == b""
    assert await held.told() == before
    assert len(held.starter.started) == 2


async def test_a_changed_file_of_roots_is_followed(make: Maker, tmp_path: Path) -> None:
    extra = tmp_path / "company.pem"
    extra.write_bytes(authority.make("l" + "1" * 19).certificate)
    held = make(extra_roots=lambda: extra)
    await held.interception.prepare(WHO)
    before = (await held.told())["trust"]
    extra.write_bytes(b"".join(authority.make("l" + f"{n}" * 19).certificate for n in range(3)))
    assert (await held.interception.prepare(OTHER)).pem.count(b"BEGIN CERTIFICATE") == before + 2 + 1
    assert (await held.told())["trust"] == before + 2
    assert len(held.starter.asked) == 1, "the process that runs is told"


async def test_a_forgotten_sandbox_is_forgotten_there_too(make: Maker) -> None:
    held = make()
    held.interception.sandbox(WHO, [lease()])
    held.interception.sandbox(OTHER, [lease()])
    await held.told()
    assert list((await held.told(OTHER))["sandboxes"]) == [WHO.sandbox, OTHER.sandbox]
    held.interception.forget(WHO.sandbox)
    assert list((await held.told(OTHER))["sandboxes"]) == [OTHER.sandbox]
    os.kill(held.starter.started[0].pid, signal.SIGKILL)
    await held.starter.started[0].wait_dead()
    assert list((await held.told(OTHER))["sandboxes"]) == [OTHER.sandbox]


async def test_a_renewed_lease_is_told_at_once(make: Maker) -> None:
    held = make()
    held.interception.sandbox(WHO, [lease()])
    before = await held.told()
    held.interception.sandbox(WHO, [lease(value=b"another-value-of-the-secret")])
    after = await held.told()
    assert before["sandboxes"][WHO.sandbox] != after["sandboxes"][WHO.sandbox]
    assert len(held.starter.started) == 1


async def test_too_much_is_refused_and_the_process_goes_on(make: Maker) -> None:
    held = make()
    gate, end = await held.open("echo.test")
    with pytest.raises(ClocheError) as caught:
        held.interception.sandbox(OTHER, [lease(f"S{number}", b"x" * 65536) for number in range(16)])
    assert caught.value.code == "secret_unavailable"
    end.send(b"x")
    assert await received(end) == b"x"
    assert not gate.over.is_set()


async def test_no_value_gets_into_the_log(make: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    held = make()
    held.interception.sandbox(WHO, [lease()])
    gate, _ = await held.open("crash.test")
    async with asyncio.timeout(5):
        await gate.over.wait()
    await held.interception.close()
    logs = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    [ended] = [line for line in logs if line["event"] == "the interceptor ended"]
    assert ended["said"] == r"its last words \x1b[31m, and <TOKEN>\n"


async def test_a_wiped_value_is_bound_to_nothing(make: Maker) -> None:
    held = make()
    wiped = lease()
    held.interception.sandbox(WHO, [wiped])
    wiped.value.wipe()
    [told] = (await held.told())["sandboxes"][WHO.sandbox]
    assert told["hosts"] == []
    assert told["placeholder"] == wiped.placeholder


@pytest.mark.req("NET-9")
async def test_the_authority_outlives_the_daemon_and_goes_with_the_last_sandbox(make: Maker, tmp_path: Path) -> None:
    held = make()
    first = await held.interception.prepare(WHO)
    again = make()
    assert (await again.interception.prepare(WHO)).pem == first.pem
    await again.interception.prepare(OTHER)
    again.interception.forget(WHO.sandbox)
    assert (tmp_path / "lineages" / WHO.lineage).exists()
    again.interception.forget(OTHER.sandbox)
    assert list((tmp_path / "lineages").iterdir()) == []
    assert (await again.interception.prepare(WHO)).pem != first.pem


async def test_a_connection_that_waited_does_not_bring_a_dead_sandbox_back(make: Maker, tmp_path: Path) -> None:
    held = make()
    waiting = asyncio.create_task(held.open("echo.test"))
    while not held.starter.started:
        await asyncio.sleep(0)
    held.interception.forget(WHO.sandbox)
    with pytest.raises(ClocheError, match="has ended") as caught:
        await waiting
    assert caught.value.code == "interceptor_missing"
    assert not list(tmp_path.glob("lineages/*"))


async def test_lineages_of_nobody_are_removed_after_adoption(make: Maker, tmp_path: Path) -> None:
    held = make()
    await held.interception.prepare(WHO)
    await held.interception.prepare(STRANGER)
    held.interception.keep_lineages({STRANGER.lineage})
    assert [path.name for path in (tmp_path / "lineages").iterdir()] == [STRANGER.lineage]


async def test_one_that_dies_at_once_is_tried_later_and_later(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "AGAIN_S", 0.4)
    held, waited, died = make(), [], 0.0
    for _ in range(4):
        gate, _ = await held.open("crash.test")
        waited.append(time.monotonic() - died)
        async with asyncio.timeout(5):
            await gate.over.wait()
        died = time.monotonic()
    assert waited[1] < 0.4
    assert 0.4 <= waited[2] < 0.8 <= waited[3] < 5
    assert len(held.starter.started) == 4


async def test_none_stays_when_nobody_uses_it(make: Maker) -> None:
    held = make(idle_s=0.2)
    _, end = await held.open("echo.test")
    child = held.starter.started[0]
    await asyncio.sleep(0.6)
    assert child.process.poll() is None, "a connection is open"
    end.close()
    async with asyncio.timeout(5):
        await child.wait_dead()
    assert held.starter.asked == [(WHO.tenant, "3.13-" + "0" * 64)]
    await held.told()
    assert len(held.starter.started) == 2


async def test_no_environment_is_said_by_name(make: Maker, tmp_path: Path) -> None:
    held = make(environment=Environment(tmp_path / "interceptor", None))
    for work in (held.interception.prepare(WHO), held.open("echo.test")):
        with pytest.raises(ClocheError) as caught:
            await work
        assert caught.value.code == "interceptor_missing"
        assert "Python 3.1" in caught.value.message
        assert "CLOCHE_INTERCEPTOR_PYTHON" in caught.value.fix
    assert "Python 3.1" in (held.interception.problem() or "")
    assert held.starter.started == []


async def test_a_process_that_cannot_begin_is_said_by_name(make: Maker, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no such module')")
    held = make(start=Starter(broken))
    with pytest.raises(ClocheError) as caught:
        await held.open("echo.test")
    assert caught.value.code == "interceptor_missing"


async def test_closing_leaves_no_process(make: Maker) -> None:
    held = make()
    gate, _ = await held.open("echo.test")
    await held.open("echo.test", STRANGER)
    await held.interception.close()
    assert gate.over.is_set()
    assert [child.process.poll() is not None for child in held.starter.started] == [True, True]
    with pytest.raises(ClocheError):
        await held.open("echo.test")
