"""One sandbox's way out, as the node keeps it: its gate, its records, its slots and its grants.

It is there before the channel is: no stream of the guest is ever looked at without a policy. What of it must outlive the
daemon is in the sandbox's record (`Stored`), so that a successor goes on with exactly the same policy and grants.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from cloche.wire.commands import DENIALS_MAX
from cloche.wire.egress import Asked, EgressLimits, EgressRecord, EgressRule, EgressView, GrantView
from cloche.wire.errors import ClocheError, error
from cloche.wire.ids import new_id
from cloche_server.channel import Channel, JsonObject, Stream
from cloche_server.egress.environment import environment
from cloche_server.egress.gate import Gate
from cloche_server.egress.records import Records
from cloche_server.egress.services import Who
from cloche_server.node import stored_policy
from cloche_server.node.clock import NS, seconds
from cloche_server.node.context import Context
from cloche_server.node.guest_text import escaped
from cloche_server.node.keeping import Entry
from cloche_server.node.records import CommandRecord, SandboxRecord
from cloche_server.node.slots import FIRST, Slots
from cloche_server.policy.decide import Policy
from cloche_server.policy.document import Organisation

if TYPE_CHECKING:
    from cloche_server.node.ways import Ways

PROXY_PORT: Final = 3128
RECORDS: Final = "egress.jsonl"
COMMAND_LINE_MAX: Final = 200
GRANTS_MAX: Final = 64
AGAIN_S: Final = 1.0
AGAIN_S_MAX: Final = 30.0
USUAL_LIMITS: Final = EgressLimits()


@dataclass(frozen=True)
class Plan:
    """What a create may reach: decided before anything is started."""

    policy: Policy
    limits: EgressLimits = USUAL_LIMITS
    secrets: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """What programs inside need to use what a preset allows: a mirror's address, for example."""
    own: tuple[str, ...] = ()
    """Names of variables that the caller set himself; ours never replace them."""

    @cached_property
    def stored(self) -> dict[str, Any]:
        """Never changed: a grant makes another one."""
        return {
            "policy": stored_policy.stored(self.policy),
            "limits": self.limits.model_dump(),
            "secrets": list(self.secrets),
            "env": dict(self.env),
            "own": list(self.own),
            "grants": [],
        }

    @classmethod
    def of_stored(cls, stored: Mapping[str, Any]) -> Plan:
        return cls(
            stored_policy.restored(stored["policy"]),
            EgressLimits.model_validate(stored["limits"]),
            tuple(stored["secrets"]),
            stored["env"],
            tuple(stored["own"]),
        )

    @property
    def intercepts(self) -> bool:
        return bool(self.secrets) or self.policy.needs_interception


@dataclass(frozen=True)
class Admitted:
    """What a sandbox whose connections are looked into needs inside."""

    env: Mapping[str, str]
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Inside:
    """What must be in the guest before its first command: variables, and the files of its trust."""

    env: Mapping[str, str]
    trust: Mapping[str, bytes] = field(default_factory=dict)


class Way:
    """Made with its sandbox, in this life or the next."""

    def __init__(
        self,
        ways: Ways,
        context: Context,
        record: SandboxRecord,
        command: Callable[[str], CommandRecord | None],
        plan: Plan | None = None,
    ) -> None:
        if record.egress is None:  # made by an older version: nothing was let out then, and nothing is now
            record.egress = Plan(Policy(Organisation())).stored
        self._ways = ways
        self._context = context
        self._record = record
        self._command = command
        self._ends: dict[str, Entry] = {}
        self._closed = False
        self._shown: tuple[Policy, EgressView] | None = None
        self._slot_env: dict[int, dict[str, str]] = {}
        self.plan = plan or Plan.of_stored(record.egress)
        self.slots = Slots()
        self.who = Who(record.id, record.owner, record.tenant, record.lineage)
        self._placeholders = ways.placeholders(self.who, self.plan.secrets)
        path = context.store.sandbox_dir(record.id) / RECORDS
        self.records = Records(path, sandbox=record.id, journal=self._recorded, clock=context.clock.wall_s)
        self.gate = Gate(
            self.who,
            self._with_grants(self.plan.policy),
            self.plan.limits,
            self.records,
            ways.services,
            command_of=self.slots.command_of,
            command_line_of=self._command_line,
            placeholders=lambda: self._placeholders,
        )

    def guest_open(self, stream: Stream, op: str, fields: JsonObject) -> None:
        self.gate.guest_open(stream, op, fields)

    # --- what is inside -----------------------------------------------------------------------------

    async def prepare(self) -> Inside:
        """Beside the engine's boot: leases and certificates take a moment when there are any."""
        plan = self.plan
        env = dict(environment(FIRST, trust=plan.intercepts, presets=plan.env))
        if not plan.intercepts:
            return Inside(env)
        trust = await self._ways.admit(self.who, plan.secrets)
        return Inside({**env, **trust.env}, trust.files)

    async def resume(self) -> None:
        """For adoption: the interceptor is told again. A source that is down is asked again; until then all that needs it
        is refused, and its placeholder is still known."""
        pause_s = AGAIN_S
        while self.plan.intercepts and not self._closed:
            try:
                await self._ways.admit(self.who, self.plan.secrets)
                return
            except ClocheError as bad:
                self._context.log.error("way out", sandbox=self.who.sandbox, code=bad.code, message=bad.message)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, AGAIN_S_MAX)

    def exec_env(self, slot: int, env: dict[str, str]) -> dict[str, str]:
        """What is bound names the first slot; only a command that runs beside another needs more. The caller's own wins."""
        if slot == FIRST:
            return env
        return {**self._variables(slot), **env}

    def _variables(self, slot: int) -> dict[str, str]:
        found = self._slot_env.get(slot)
        if found is None:
            usual = environment(FIRST, trust=False, presets={})
            own = environment(slot, trust=False, presets={})
            found = {
                name: value for name, value in own.items() if usual.get(name) != value and name not in self.plan.own
            }
            self._slot_env[slot] = found
        return found

    # --- grants -------------------------------------------------------------------------------------

    def view(self) -> EgressView:
        policy = self.gate.policy
        if self._shown is None or self._shown[0] is not policy:
            self._shown = policy, egress_view(self.plan, policy)
        return self._shown[1]

    def grants(self) -> list[GrantView]:
        now = self._context.clock.boot_ns()
        return [
            GrantView(
                id=each["id"], rule=EgressRule.model_validate(each["rule"]), ends_in_s=(each["until_ns"] - now) / NS
            )
            for each in self._stored_grants()
            if each["until_ns"] > now
        ]

    async def grant(self, by: str, asked: Asked, for_s: float) -> GrantView:
        """Written down and journalled before it holds."""
        name = new_id("grant")
        rule, rules = await self._ways.granted(asked, name)
        if self._closed:
            raise error("sandbox_ended", f"Sandbox {self.who.sandbox} has ended.")
        if len(self._stored_grants()) >= GRANTS_MAX:
            raise error("overloaded", f"The sandbox has {GRANTS_MAX} grants already.", fix="Take one back first.")
        policy = self.gate.policy
        for each in rules:
            policy = policy.with_grant(each)  # raises what the organisation does not offer
        if policy.needs_interception and not self.plan.intercepts:
            raise error(
                "policy_refused",
                "This grant can be kept only by looking into the connection, and the sandbox was made without that.",
                fix="Grant the whole host, or create a sandbox with such a rule.",
            )
        until_ns = self._context.clock.boot_ns() + seconds(for_s)
        stored = {"id": name, "rule": rule.model_dump(mode="json"), "until_ns": until_ns, "by": by}
        stored["rules"] = stored_policy.rows(rules)  # a preset may say something else tomorrow
        self._journal("egress.granted", {"grant": name, "by": by, "for_s": for_s, "rules": [each.id for each in rules]})
        self._save([*self._stored_grants(), stored])
        self.gate.change(self._with_grants(self.plan.policy))
        return GrantView(id=name, rule=rule, ends_in_s=for_s)

    def revoke(self, by: str, grant: str) -> None:
        left = [each for each in self._stored_grants() if each["id"] != grant]
        if len(left) == len(self._stored_grants()):
            raise error("grant_not_found", f"There is no grant {escaped(grant, 64)!r}.")
        self._journal("egress.grant_ended", {"grant": grant, "by": by})
        self._save(left)
        if (entry := self._ends.pop(grant, None)) is not None:
            entry.cancel()
        self.gate.change(self._with_grants(self.plan.policy))

    def _with_grants(self, policy: Policy) -> Policy:
        now = self._context.clock.boot_ns()
        for each in self._stored_grants():
            if each["until_ns"] <= now:
                continue
            for rule in stored_policy.rules(each["rules"]):
                policy = policy.with_grant(rule)
            if each["id"] not in self._ends:
                self._ends[each["id"]] = self._context.agenda.at(each["until_ns"], self._expiry(each["id"]))
        return policy

    def _expiry(self, grant: str) -> Callable[[], None]:
        return lambda: None if self._closed else self.revoke("time", grant)

    def _stored_grants(self) -> list[dict[str, Any]]:
        assert self._record.egress is not None
        found: list[dict[str, Any]] = self._record.egress["grants"]
        return found

    def _save(self, grants: list[dict[str, Any]]) -> None:
        assert self._record.egress is not None
        self._record.egress = {**self._record.egress, "grants": grants}
        self._context.store.save_sandbox(self._record)

    # --- records ------------------------------------------------------------------------------------

    def _recorded(self, record: EgressRecord) -> None:
        """Before its effect. A path is the guest's text: the journal has its hash, the sandbox's own records have it."""
        detail: dict[str, Any] = {
            "code": record.code,
            "rule": record.rule,
            "policy": record.policy,
            "host": record.host,
            "port": record.port,
            "connection": record.connection,
        }
        for name in ("address", "method", "bytes_up", "bytes_down", "duration_s"):
            if (value := getattr(record, name)) is not None:
                detail[name] = value
        if record.path is not None:
            detail["path_sha256"] = hashlib.sha256(record.path.encode("utf-8", "surrogatepass")).hexdigest()
        self._journal(f"egress.{record.verdict}", detail, record.command)
        if record.verdict in ("denied", "alert") and record.command is not None:
            self._denied(record, record.command)

    def _denied(self, record: EgressRecord, command: str) -> None:
        found = self._command(command)
        if found is None or len(found.denials or ()) >= DENIALS_MAX:
            return
        found.denials = [*(found.denials or ()), record.model_dump(mode="json")]
        if found.ended_ns is not None:  # an alert can come after the program that caused it has ended
            self._context.store.save_command(found)

    def before_end(self, command: str, then: Callable[[], None]) -> None:
        """Calls `then` when all is known that was refused to a command whose program is over; soon, in any case."""
        self.gate.settling.when_settled(command, then)

    def denials_again(self, command: CommandRecord) -> None:
        """For adoption: what a predecessor had in memory is in the records."""
        found = [
            each.model_dump(mode="json")
            for each in self.records.read(0, 10_000)
            if each.command == command.id and each.verdict in ("denied", "alert")
        ]
        command.denials = found[:DENIALS_MAX] or None

    def _journal(self, kind: str, detail: dict[str, Any], command: str | None = None) -> None:
        who = self.who
        self._context.journal.write(
            kind, sandbox=who.sandbox, command=command, owner=who.owner, tenant=who.tenant, detail=detail
        )

    def _command_line(self, command: str) -> str | None:
        found = self._command(command)
        return None if found is None else escaped(" ".join(found.request["argv"]), COMMAND_LINE_MAX)

    # --- the end ------------------------------------------------------------------------------------

    async def close(self, reason: str) -> None:
        """Nothing goes out any more, and what was lent goes back."""
        if self._closed:
            return
        self._closed = True
        for entry in self._ends.values():
            entry.cancel()
        self._ways.release(self.who)
        try:
            await self.gate.close(reason)
        finally:
            self.records.close()


def egress_view(plan: Plan, policy: Policy) -> EgressView:
    return EgressView(
        rules=stored_policy.shown(policy),
        policy=policy.digest,
        fronting=policy.fronting,
        limits=plan.limits,
        secrets=list(plan.secrets),
    )


def stored_view(record: SandboxRecord) -> EgressView:
    """Of one that has ended."""
    if record.egress is None:
        return EgressView()
    plan = Plan.of_stored(record.egress)
    return egress_view(plan, plan.policy)


async def send_trust(channel: Channel, files: Mapping[str, bytes]) -> None:
    """Certificates, for every program inside; before the first of them runs."""
    for name, data in files.items():
        await channel.call("trust", {"name": name}, data=_once(data))


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
