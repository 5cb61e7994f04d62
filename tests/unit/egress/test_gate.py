"""The gate itself: approvals, changes of the policy, secrets in names, hostile guests, and an end that leaves nothing."""

import asyncio
import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cloche.wire.egress import EgressLimits, EgressRule
from cloche_server.policy.decide import effective
from cloche_server.policy.document import Organisation
from cloche_server.policy.model import Effect
from tests.unit.egress.hellos import hello
from tests.unit.egress.test_tunnels import HERE, HOST, tcp
from tests.unit.egress.world import dialled_instead, echo, nameserver, no_preset, opened, serving

ASK = EgressRule(effect="ask", host=HOST)


def ask(port: int) -> EgressRule:
    return EgressRule(effect="ask", host=HOST, ports=[port], protocol="tcp")


@pytest.mark.req("POL-3")
async def test_what_is_approved_is_what_was_shown(tmp_path: Path) -> None:
    async with serving(echo) as server:
        async with opened(tmp_path, [ask(server.port)], ports=[server.port], organisation=HERE) as world:
            world.person.answers = [True]
            stream = world.connect_proxy(HOST, server.port)
            await stream.read(b" 200 ")
            question = world.person.asked[0]
            assert (question.host, question.port, question.address) == (HOST, server.port, "127.0.0.1")
            assert (question.sandbox, question.owner, question.command) == ("sk3m9q", "ann", "command-1")
            world.person.answers = [False]
            answer = await world.connect_proxy(HOST, server.port).rest()
            assert b"X-Cloche-Denied: not_approved" in answer
            assert len(world.person.asked) == 2, "an approval is for one action"
    assert server.accepted == 1


@pytest.mark.req("POL-3")
async def test_a_name_that_changes_after_the_approval_is_not_dialled(tmp_path: Path) -> None:
    addresses = ["127.0.0.1"]
    async with serving(echo) as server:
        with nameserver({HOST: lambda: addresses}) as (names, _):
            async with opened(tmp_path, [ask(server.port)], ports=[server.port], nameservers=(names,)) as world:
                world.organisation = replace(
                    world.organisation,
                    addresses=world.organisation.addresses | {(each, None) for each in _both()},
                )
                world.person.answers = [True]
                world.person.before_answer = lambda: addresses.__setitem__(0, "127.0.0.2")
                answer = await world.connect_proxy(HOST, server.port).rest()
                assert b"X-Cloche-Denied: target_changed" in answer
    assert server.accepted == 0


def _both() -> list:
    from ipaddress import ip_address

    return [ip_address("127.0.0.1"), ip_address("127.0.0.2")]


@pytest.mark.req("POL-3")
async def test_a_name_that_only_a_pattern_matches_is_not_looked_up_before_the_answer(tmp_path: Path) -> None:
    """Else the query itself would carry the name, which the guest chose, out."""
    with nameserver({f"data.{HOST}": ["127.0.0.1"]}) as (names, asked):
        rules = [EgressRule(effect="ask", host=f"*.{HOST}")]
        async with opened(tmp_path, rules, nameservers=(names,)) as world:
            world.person.answers = [False]
            assert b"not_approved" in await world.connect_proxy(f"data.{HOST}", 443).rest()
            assert world.person.asked[0].address == ""
            assert not asked
            world.person.answers = [True]
            assert b"address_refused" in await world.connect_proxy(f"data.{HOST}", 443).rest()
            assert asked
        organisation = Organisation(default=Effect.ASK)
        asked.clear()
        async with opened(tmp_path / "2", organisation=organisation, nameservers=(names,)) as world:
            world.person.answers = [False]
            assert b"not_approved" in await world.connect_proxy(f"data.{HOST}", 443).rest()
            assert not asked


@pytest.mark.req("POL-3")
async def test_who_waits_for_a_person_and_goes_takes_the_question_along(tmp_path: Path) -> None:
    async with opened(tmp_path, [ASK], organisation=HERE, ports=[443]) as world:
        stream = world.connect_proxy(HOST, 443)
        await world.until(lambda: bool(world.person.asked))
        stream.abort()
        await world.until(lambda: world.person.cancelled == 1)
        await world.until(lambda: world.gate.open_count["talks"] == 0)


@pytest.mark.req("POL-3")
async def test_a_change_of_the_policy_cuts_and_voids(tmp_path: Path) -> None:
    async with serving(echo) as server:
        rules = [tcp(HOST, server.port), ASK]
        async with opened(tmp_path, rules, ports=[server.port, 443], organisation=HERE) as world:
            stream = world.connect_proxy(HOST, server.port)
            await stream.read(b"\r\n\r\n")
            same = effective(world.organisation, rules, presets=no_preset)
            world.gate.change(same)
            stream.send(b"still")
            await stream.read(b"still")
            release = asyncio.Event()

            async def slowly(question, *, timeout_s):
                await release.wait()
                return type("Yes", (), {"approved": True, "by": "ann", "reason": ""})

            world.gate.services.approvals.ask = slowly  # type: ignore[method-assign]
            waits = world.connect_proxy(HOST, 443)
            await world.until(lambda: world.gate.open_count["talks"] == 2)
            await asyncio.sleep(0.05)
            world.gate.change(effective(world.organisation, [ASK], presets=no_preset))
            assert (await stream.end())["error"]["code"] == "policy_changed"
            assert world.person.voided == ["sk3m9q", "sk3m9q"]
            release.set()
            assert b"X-Cloche-Denied: policy_changed" in await waits.rest()
            assert await world.guest.ask(HOST) == [443, 80]
    assert world.codes("closed") == ["policy_changed"]


class Marked:
    def found(self, text: bytes) -> str | None:
        return "TOKEN" if b"cloche_ph_" in text else None


@pytest.mark.req("SEC-3")
async def test_a_placeholder_in_a_name_is_an_alert_and_goes_nowhere(tmp_path: Path) -> None:
    with nameserver({}) as (names, asked):
        async with opened(tmp_path, ["*.example.com"], nameservers=(names,), placeholders=Marked) as world:
            name = "cloche_ph_8qx.example.com"
            answer = await world.connect_proxy(name, 443).rest()
            assert b"placeholder_elsewhere" in answer
            assert await world.guest.ask(name) == []
            assert [(each.verdict, each.code) for each in world.records()] == [
                ("alert", "placeholder_elsewhere"), ("denied", "placeholder_elsewhere"),
            ] * 2  # fmt: skip
            assert not any("cloche_ph_" in each.model_dump_json() for each in world.records())
        assert not asked


@pytest.mark.req("NET-5")
@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("shell", {}),
        ("proxy", {"slot": 64}),
        ("proxy", {"slot": "1"}),
        ("proxy", {"slot": True}),
        ("connect", {"name": HOST}),
        ("connect", {"name": HOST, "port": 0}),
        ("connect", {"name": HOST, "port": 70_000}),
        ("connect", {"name": 5, "port": 443}),
        ("connect", {"name": "x" * 254, "port": 443}),
        ("resolve", {"name": ["a"]}),
        ("resolve", {"name": "a" * 300}),
    ],
)
async def test_an_open_that_is_not_in_the_contract_is_refused(tmp_path: Path, op: str, fields: dict) -> None:
    async with opened(tmp_path, [HOST]) as world:
        assert "error" in await world.guest.open(op, **fields).end()
        assert world.gate.open_count["talks"] == 0


NAMES = [
    "0x7f.1",
    "2130706433",
    "0177.0.0.1",
    "127.1",
    "a b",
    "a\nb",
    "a..b",
    "." * 10,
    "x" * 250,
    "é" * 100,
    "\ud800",
    "[::1]",
    "::1%lo",
]


@pytest.mark.req("NET-4")
@pytest.mark.parametrize("name", NAMES)
async def test_strange_names_are_refused_everywhere(tmp_path: Path, name: str) -> None:
    async with opened(tmp_path, ["*.example.com"]) as world:
        assert await world.guest.ask(name) == []
        stream = world.guest.open("connect", name=name, port=443)
        stream.send(hello("a.example.com"))
        await stream.rest()
        text = "".join(each.model_dump_json() for each in world.records())
        assert text.isprintable()
        assert world.codes()[-1] in ("bad_name", "no_rule", "needs_name")


@pytest.mark.req("NET-8")
@pytest.mark.req("NET-9")
async def test_ten_thousand_half_open_streams(tmp_path: Path, long_run: bool) -> None:
    """Most are refused at once; what was taken is bounded all the time; when they are gone, others get in."""
    count, limits = 10_000 if long_run else 1_500, EgressLimits(connections=4)
    async with serving(echo) as server:
        async with opened(
            tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE, limits=limits
        ) as world:
            for _ in range(count):
                world.guest.open("proxy", slot=1)
            most = 0

            def refused() -> bool:
                nonlocal most
                most = max(most, world.gate.open_count["talks"])
                assert world.budget.bytes_used <= 68 * 65_536
                return sum(each.result is not None for each in world.guest.streams.values()) >= count - 68

            await world.until(refused, 60)
            assert most == 4 + 64
            denied = [each for each in world.records() if each.code == "too_many_connections"]
            assert 1 <= len(denied) <= 60
            for stream in list(world.guest.streams.values()):
                if stream.result is None:
                    stream.abort()
            await world.until(lambda: world.gate.open_count["talks"] == 0)
            stream = world.connect_proxy(HOST, server.port)
            await stream.read(b" 200 ")


async def test_who_says_nothing_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("proxy", "carry"):
        monkeypatch.setattr(f"cloche_server.egress.conversations.{module}.FIRST_BYTE_S", 0.1)
    async with serving(echo) as server:
        async with opened(tmp_path, [HOST], ports=[443], organisation=HERE) as world:
            silent = world.proxy()
            assert "error" in await silent.end()
            with dialled_instead(server.port):
                stream = world.connect_proxy(HOST, 443)
                await stream.read(b"\r\n\r\n")
                assert "error" in await stream.end()
            assert world.codes() == ["timed_out"]
            await world.until(lambda: server.open == 0)


async def test_no_descriptor_is_left_whatever_happened(tmp_path: Path) -> None:
    """A thousand connections that end in every way; the number of open files is what it was."""
    async with serving(echo) as server:
        limits = EgressLimits(attempts_per_s=10_000, connections=100)
        async with opened(
            tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE, limits=limits
        ) as world:
            warm = world.connect_proxy(HOST, server.port)
            await warm.read(b" 200 ")
            warm.abort()
            await world.until(lambda: server.open == 0)
            gc.collect()  # sockets of earlier tests are not ours to count
            before = len(os.listdir("/proc/self/fd"))
            for round_ in range(20):
                streams = [world.connect_proxy(HOST, server.port) for _ in range(25)]
                for number, stream in enumerate(streams):
                    way = (number + round_) % 5
                    if way == 0:
                        stream.abort()
                    elif way == 1:
                        stream.eof()
                    elif way == 2:
                        stream.send(b"x" * 1000)
                    elif way == 3:
                        stream.send(b"y")
                        stream.eof()
                await asyncio.sleep(0.01)
                for stream in streams:
                    if stream.result is None:
                        stream.abort()
            await world.until(lambda: world.gate.open_count == {"talks": 0, "connections": 0, "slots": 0}, 60)
            await world.until(lambda: len(os.listdir("/proc/self/fd")) <= before, 20)  # the server closes its own later
            allowed, closed = world.records("allowed"), world.records("closed")
            assert len(allowed) == len(closed)


async def test_close_leaves_nothing_in_any_state(tmp_path: Path) -> None:
    async with serving(echo) as server:
        rules = [tcp(HOST, server.port), ASK]
        async with opened(tmp_path, rules, ports=[server.port, 443], organisation=HERE) as world:
            await (flowing := world.connect_proxy(HOST, server.port)).read(b" 200 ")
            waiting = world.connect_proxy(HOST, 443)
            await world.until(lambda: bool(world.person.asked))
            half = world.proxy(b"CONN")
            lingering = world.connect_proxy("evil.example", 443)
            await lingering.rest()
            await world.until(lambda: world.gate.open_count["talks"] == 4)
            await world.gate.close("killed")
            assert world.gate.open_count == {"talks": 0, "connections": 0, "slots": 0}
            for stream in (flowing, waiting, half):
                assert (await stream.end())["error"]["code"] in ("killed", "closed")
            late = world.proxy(b"CONNECT a:443 HTTP/1.1\r\n\r\n")
            assert "error" in await late.end()
            await world.until(lambda: server.open == 0)


@pytest.mark.req("NET-6")
async def test_what_cannot_be_recorded_does_not_happen(tmp_path: Path) -> None:
    async with serving(echo) as server:
        async with opened(tmp_path, [tcp(HOST, server.port)], ports=[server.port], organisation=HERE) as world:
            (tmp_path / "egress.jsonl").mkdir()
            answer = await world.connect_proxy(HOST, server.port).rest()
            assert answer.startswith(b"HTTP/1.1 500 Cloche: the node cannot write its records")
    assert server.accepted == 0
