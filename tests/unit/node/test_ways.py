"""The way out as the node keeps it: decided before anything starts, written down, changed only from outside."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from cloche.wire.commands import StartCommand
from cloche.wire.egress import EgressLimits, EgressRecord, EgressRule, Grant
from cloche.wire.errors import ClocheError
from cloche.wire.sandboxes import CreateSandbox
from cloche_server.node.node import Config, Node
from cloche_server.node.ways import limits_within
from tests.unit.node.house import ADMIN, ME, OTHER, House, make_images, raises, until
from tests.unit.node.native_engine import can_run

pytestmark = pytest.mark.skipif(not can_run(), reason="needs the agent, and root for a pid namespace")
PROXY = "http://127.127.0.{}:3128"


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path, make_images(tmp_path))
    await made.node.start()
    yield made
    await made.node.kill_all(ADMIN)
    await made.node.stop()


def write_policy(house: House, text: str) -> None:
    directory = house.root / "state" / "config"
    directory.mkdir(exist_ok=True)
    (directory / "policy.yaml").write_text("version: 1\n" + text)


def kinds(house: House, sandbox: str) -> list[str]:
    return [line.kind for line in house.node.context.journal.read(0) if line.sandbox == sandbox]


async def env_of(house: House, sandbox: str, **more: object) -> Mapping[str, str]:
    text = (await house.text(await house.run(sandbox, "env", **more))).decode()
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


@pytest.mark.req("NET-2")
async def test_a_sandbox_that_asks_for_nothing_gets_nothing(house: House) -> None:
    made = await house.create()
    assert made.egress.rules == []
    assert made.egress.fronting == "closed"
    assert made.egress.policy.startswith("sha256:")
    assert made.egress.limits == EgressLimits()


@pytest.mark.req("POL-1")
async def test_the_organisations_file_is_read_again_when_it_has_changed(house: House) -> None:
    before = (await house.create()).egress
    write_policy(house, "deny: ['*.evil.example']\nallow: [good.example]\n")
    made = await house.create()
    assert [rule.split()[0] for rule in made.egress.rules] == ["deny[0]:", "allow[0]:"]
    assert made.egress.policy != before.policy
    write_policy(house, "allow: 5\n")
    refused = await raises("policy_invalid", house.create())
    assert "policy.yaml:2" in refused.message
    assert (await house.node.get(ME, made.id)).egress == made.egress, "what runs goes on with what it has"
    write_policy(house, "")
    assert (await house.create()).egress.rules == []


@pytest.mark.req("NET-3")
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"egress": ["elsewhere.example"]}, "policy_refused"),
        ({"egress": ["*.com"]}, "policy_invalid"),
        ({"egress": ["preset:nonsense"]}, "preset_unavailable"),
        ({"secrets": ["NOBODYS"]}, "secret_not_found"),
        ({"secrets": ["BOTH"], "env": {"BOTH": "1"}}, "invalid_request"),
        ({"egress_limits": {"connections": 100}}, "policy_refused"),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_starts(
    house: House, fields: dict[str, object], code: str
) -> None:
    write_policy(house, "offer: [offered.example]\nlimits: {connections: 10}\n")
    lines = house.node.context.journal.seq
    await raises(code, house.create(**fields))
    assert house.node.context.journal.seq == lines
    assert house.engine.instances == {}


@pytest.mark.req("NET-3")
async def test_what_needs_an_interceptor_is_not_made_without_one(house: House) -> None:
    rule = EgressRule(host="api.example", methods=["GET"])
    await raises("interceptor_missing", house.create(egress=[rule]))
    assert house.node.roster.live == {}
    assert house.node.context.store.sandboxes() == []


@pytest.mark.req("NET-8")
def test_limits_are_the_organisations_where_nothing_was_asked() -> None:
    most = EgressLimits(connections=10, bytes_per_s=4096)
    assert limits_within(EgressLimits(), None) == EgressLimits()
    found = limits_within(EgressLimits(), most)
    assert (found.connections, found.bytes_per_s) == (10, 4096)
    assert limits_within(EgressLimits(connections=5), most).connections == 5
    with pytest.raises(ClocheError, match="connections"):
        limits_within(EgressLimits(connections=11), most)


@pytest.mark.req("NET-1")
async def test_commands_are_told_where_the_way_out_is_unless_the_caller_says_otherwise(house: House) -> None:
    made = await house.create(env={"HTTPS_PROXY": "mine"})
    env = await env_of(house, made.id)
    assert env["HTTP_PROXY"] == env["http_proxy"] == PROXY.format(2)
    assert env["HTTPS_PROXY"] == "mine"
    assert "SSL_CERT_FILE" not in env
    beside = await house.node.start_command(ME, made.id, StartCommand(argv=["sleep", "60"]), None)
    second = await env_of(house, made.id)
    assert second["http_proxy"] == PROXY.format(3)
    assert second["HTTPS_PROXY"] == "mine"
    assert (await env_of(house, made.id, env={"http_proxy": "own"}))["http_proxy"] == "own"
    await house.node.kill_command(ME, made.id, beside.id)
    assert (await env_of(house, made.id))["http_proxy"] == PROXY.format(2)


@pytest.mark.req("NET-3")
async def test_a_grant_holds_for_its_time(house: House) -> None:
    made = await house.create(egress=["a.example"])
    granted = await house.node.grant_egress(ME, made.id, Grant(rule="b.example", for_s=600))
    view = (await house.node.get(ME, made.id)).egress
    assert [rule.split()[0] for rule in view.rules] == ["egress[0]:", f"grant/{granted.id}[0]:"]
    assert view.policy != made.egress.policy
    assert kinds(house, made.id)[-1] == "egress.granted"
    house.clock.pass_s(601)
    house.node.context.agenda.run_due()
    after = (await house.node.get(ME, made.id)).egress
    assert after == made.egress
    assert await house.node.list_grants(ME, made.id) == []
    assert kinds(house, made.id)[-1] == "egress.grant_ended"


@pytest.mark.req("NET-3")
async def test_a_grant_is_given_and_taken_back_only_by_those_who_may(house: House) -> None:
    write_policy(house, "deny: [never.example]\noffer: [b.example, never.example]\n")
    made = await house.create()
    await raises("not_found", house.node.grant_egress(OTHER, made.id, Grant(rule="b.example")))
    await raises("policy_refused", house.node.grant_egress(ME, made.id, Grant(rule="c.example")))
    await raises("policy_invalid", house.node.grant_egress(ME, made.id, Grant(rule="deny:b.example")))
    narrow = EgressRule(host="b.example", methods=["GET"])
    await raises("policy_refused", house.node.grant_egress(ME, made.id, Grant(rule=narrow)))
    assert await house.node.list_grants(ME, made.id) == [], "what was refused is not written down"
    await house.node.grant_egress(ME, made.id, Grant(rule="never.example"))
    told = await house.node.explain_egress(ME, made.id, target="never.example:443", method=None)
    assert (told.effect, told.rule) == ("deny", "deny[0]"), "the organisation's denial beats a grant"
    granted = await house.node.grant_egress(ADMIN, made.id, Grant(rule="b.example"))
    assert (await house.node.explain_egress(ME, made.id, target="https://b.example/x", method="GET")).effect == "allow"
    await raises("grant_not_found", house.node.revoke_grant(ME, made.id, "gnothing"))
    await house.node.revoke_grant(ME, made.id, granted.id)
    assert (await house.node.explain_egress(ME, made.id, target="b.example:443", method=None)).effect == "deny"


def denied(command: str | None, host: str = "x.example") -> EgressRecord:
    return EgressRecord(
        seq=0,
        at=0,
        sandbox="",
        command=command,
        verdict="denied",
        code="no_rule",
        rule="default",
        host=host,
        port=443,
        connection=1,
        path="/secret-in-a-path",
    )


@pytest.mark.req("NET-7")
async def test_a_denial_is_on_its_command_and_stays_there(house: House) -> None:
    made = await house.create()
    live = house.node.roster.live[made.id]
    command = await house.node.start_command(ME, made.id, StartCommand(argv=["cat"], stdin=True), None)
    for number in range(25):
        live.way.records.write(denied(command.id, f"h{number}.example"))
    live.way.records.write(denied(None))
    seen = (await house.node.get_command(ME, made.id, command.id)).denials
    assert [each.host for each in seen] == [f"h{number}.example" for number in range(20)]
    await house.node.kill_command(ME, made.id, command.id)
    for _ in range(20):  # beyond those that are kept in memory
        await house.run(made.id, "true")
    assert (await house.node.get_command(ME, made.id, command.id)).denials == seen
    lines = [line for line in house.node.context.journal.read(0) if line.kind == "egress.denied"]
    assert len(lines) == 26
    assert lines[0].command == command.id
    assert "secret-in-a-path" not in str(lines[0].detail)


@pytest.mark.req("NET-6")
async def test_records_can_be_read_while_it_lives_and_after(house: House) -> None:
    made = await house.create()
    live = house.node.roster.live[made.id]
    seen: list[str] = []

    async def follow() -> None:
        async for record in house.node.follow_egress(ME, made.id, after=0):
            seen[len(seen) :] = [record.host]

    follower = asyncio.ensure_future(follow())
    live.way.records.write(denied(None, "one.example"))
    await until(lambda: seen == ["one.example"])
    live.way.records.write(denied(None, "two.example"))
    await until(lambda: len(seen) == 2)
    await house.node.kill(ME, made.id)
    await asyncio.wait_for(follower, 10)
    page = await house.node.egress_records(ME, made.id, after=1, limit=10)
    assert [each.host for each in page.records] == ["two.example"]
    await raises("not_found", house.node.egress_records(OTHER, made.id, after=0, limit=10))


@pytest.mark.req("NET-9")
async def test_the_next_daemon_has_the_same_policy_grants_and_denials(tmp_path: Path) -> None:
    from tests.unit.node.native_engine import Holder, NativeEngine

    holder = Holder(tmp_path / "holder.sock")
    config = Config(tmp_path / "state", make_images(tmp_path))
    try:
        first = Node(config, {"gvisor": NativeEngine(holder.path)})
        await first.start()
        made = await first.create(ME, CreateSandbox(egress=["a.example"], limits={"disk_bytes": 1 << 24}), None)  # type: ignore[arg-type]
        await first.grant_egress(ME, made.id, Grant(rule="b.example", for_s=600))
        command = await first.start_command(ME, made.id, StartCommand(argv=["cat"], stdin=True), None)
        first.roster.live[made.id].way.records.write(denied(command.id))
        before = await first.get(ME, made.id)
        await first.stop()
        second = Node(config, {"gvisor": NativeEngine(holder.path)})
        await second.start()
        after = await second.get(ME, made.id)
        assert after.egress == before.egress
        assert [each.rule.host for each in await second.list_grants(ME, made.id)] == ["b.example"]
        again = await second.get_command(ME, made.id, command.id)
        assert [each.host for each in again.denials] == ["x.example"]
        assert second.roster.live[made.id].way.slots.command_of(1) == command.id
        second.roster.live[made.id].way.records.write(denied(command.id, "y.example"))
        assert [each.seq for each in (await second.egress_records(ME, made.id, after=0, limit=10)).records] == [1, 2]
        await second.kill_all(ADMIN)
        await second.stop()
    finally:
        holder.close()
