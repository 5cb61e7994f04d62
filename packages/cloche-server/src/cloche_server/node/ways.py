"""The way out of a whole node: the organisation's file, what a create is given, and who serves every gate.

A create is decided here, before anything of it is started: what it asks beyond what the organisation offers, a preset that
the node's tools do not give, a secret that is not there, are errors by name. The file is read again when it has changed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from cloche.wire.defaults import TTL_S_MAX
from cloche.wire.egress import Asked, EgressLimits, EgressRule
from cloche.wire.errors import ClocheError, error
from cloche.wire.sandboxes import CreateSandbox
from cloche_server.api.backend import Caller
from cloche_server.egress.environment import environment
from cloche_server.egress.resolver import HostResolver
from cloche_server.egress.services import (
    Approver,
    InterceptedConnection,
    Interceptor,
    Placeholders,
    Services,
    Who,
)
from cloche_server.node.context import Context
from cloche_server.node.records import CommandRecord, SandboxRecord
from cloche_server.node.way import USUAL_LIMITS, Admitted, Plan, Way
from cloche_server.policy.decide import Policy, effective
from cloche_server.policy.document import Organisation, load
from cloche_server.policy.model import Rule, Target
from cloche_server.policy.presets import Presets
from cloche_server.policy.rules import parse_short, rules_of
from cloche_server.secrets.leases import Lease
from cloche_server.secrets.service import Secrets

FILE: Final = "policy.yaml"
ADMISSION_S: Final = 5.0
"""How long a connection waits, after a restart of the daemon, for its sandbox's secrets; then it is refused."""
OURS: Final = frozenset(environment(1, trust=True))
"""Variables that a sandbox is given, unless its caller sets them himself."""


class PolicyFile:
    """The organisation's file. Without one, nothing is allowed that a request does not ask for."""

    def __init__(self, path: Path | None) -> None:
        self.presets = Presets()
        self._path = path
        self._stamp = self._look()
        self.organisation = load(path, presets=self.presets)

    async def current(self) -> Organisation:
        """Read again when it has changed. What is wrong in it is an error by name; then the last good one goes on."""
        stamp = self._look()
        if stamp != self._stamp:
            found = await asyncio.to_thread(load, self._path, presets=self.presets)  # it may name a preset
            self.organisation, self._stamp = found, stamp
        return self.organisation

    def _look(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


class Trust(Protocol):
    """Certificates for the guest."""

    @property
    def pem(self) -> bytes: ...

    @property
    def java(self) -> bytes | None: ...


class Interception(Interceptor, Protocol):
    """What the node needs of `egress.interception`."""

    async def prepare(self, who: Who, *, max_age_s: float = 0.0) -> Trust: ...

    def sandbox(self, who: Who, leases: Sequence[Lease]) -> None: ...

    def forget(self, sandbox: str) -> None: ...

    def keep_lineages(self, lineages: set[str]) -> None: ...

    def state(self) -> str: ...

    async def close(self) -> None: ...


class NoInterception:
    """A node without an interceptor refuses by name what needs one."""

    async def open(
        self, gate_side: InterceptedConnection, who: Who, target: Target, *, tls: bool, rule: str
    ) -> socket.socket:
        raise _missing()

    async def prepare(self, who: Who, *, max_age_s: float = 0.0) -> Trust:
        raise _missing()

    def sandbox(self, who: Who, leases: Sequence[Lease]) -> None: ...

    def forget(self, sandbox: str) -> None: ...

    def keep_lineages(self, lineages: set[str]) -> None: ...

    def state(self) -> str:
        return "this node has none"

    async def close(self) -> None: ...


@dataclass
class _Guest:
    """A sandbox whose connections are looked into; `admitted` when the interceptor knows all of its secrets."""

    who: Who
    admitted: asyncio.Event = field(default_factory=asyncio.Event)


class _Doorkeeper:
    """The gates' interceptor."""

    def __init__(self, ways: Ways) -> None:
        self._ways = ways

    async def open(
        self, gate_side: InterceptedConnection, who: Who, target: Target, *, tls: bool, rule: str
    ) -> socket.socket:
        return await self._ways.intercept(gate_side, who, target, tls=tls, rule=rule)


class Ways:
    """One for a node. Made before the first sandbox is, also before one is adopted."""

    def __init__(
        self,
        context: Context,
        file: PolicyFile,
        *,
        secrets: Secrets,
        approvals: Approver,
        interception: Interception,
    ) -> None:
        self.file = file
        self._resolver = HostResolver(lambda: self.file.organisation.nameservers)
        self.services = Services(
            organisation=lambda: self.file.organisation,
            resolver=self._resolver,
            approvals=approvals,
            interception=_Doorkeeper(self),
            spawn=context.spawn,
        )
        self._context = context
        self._secrets = secrets
        self._interception = interception
        self._presets = file.presets
        self._usual: tuple[Organisation, Plan] | None = None
        secrets.changed = self._leases_changed
        secrets.ended = interception.forget
        self._guests: dict[str, _Guest] = {}

    # --- a create -----------------------------------------------------------------------------------

    async def plan(self, caller: Caller, request: CreateSandbox) -> Plan:
        """What it may reach. Raises before anything is started."""
        organisation = await self.file.current()
        own = OURS.intersection(request.env)
        if not (request.egress or request.secrets or own or request.egress_limits != USUAL_LIMITS):
            return self._usual_plan(organisation)
        both = sorted(set(request.secrets) & set(request.env))
        if both:
            raise error("invalid_request", f"{both[0]} is both a secret and a variable of the environment.")
        return await self._asked(caller, request, organisation)

    def _usual_plan(self, organisation: Organisation) -> Plan:
        """Of most sandboxes: nothing was asked. Decided once for each version of the file."""
        if self._usual is None or self._usual[0] is not organisation:
            limits = limits_within(USUAL_LIMITS, organisation.limits)
            self._usual = organisation, Plan(effective(organisation, (), presets=self._presets), limits)
        return self._usual[1]

    async def _asked(self, caller: Caller, request: CreateSandbox, organisation: Organisation) -> Plan:
        names = tuple(dict.fromkeys(request.secrets))
        hosts = self._secrets.hosts_of(caller.owner, caller.tenant, names)

        def decide() -> tuple[Policy, dict[str, str]]:
            policy = effective(organisation, request.egress, presets=self._presets, intercept_hosts=hosts)
            env: dict[str, str] = {}
            for preset in named_presets(request.egress):
                env |= self._presets(preset).env
            return policy, env

        # A preset asks the operator's own tools, which takes a moment the first time.
        slow = bool(named_presets(request.egress))
        policy, env = await asyncio.to_thread(decide) if slow else decide()
        limits = limits_within(request.egress_limits, organisation.limits)
        return Plan(policy, limits, names, env, tuple(sorted({*OURS, *env}.intersection(request.env))))

    def open(
        self, record: SandboxRecord, command: Callable[[str], CommandRecord | None], plan: Plan | None = None
    ) -> Way:
        """`plan` None: what the record says, of one that a predecessor made."""
        return Way(self, self._context, record, command, plan)

    # --- a grant ------------------------------------------------------------------------------------

    async def granted(self, asked: Asked, name: str) -> tuple[EgressRule, tuple[Rule, ...]]:
        """What was asked for, and the rules that it comes to."""
        rule = parse_short(asked) if isinstance(asked, str) else asked
        if rule.effect == "deny":
            raise error("policy_invalid", "A grant lets out; it cannot deny.")

        def rules() -> tuple[Rule, ...]:
            return rules_of([rule], prefix=f"grant/{name}", presets=self._presets, source="a grant")

        return rule, await asyncio.to_thread(rules) if rule.preset is not None else rules()

    # --- what needs the interceptor -----------------------------------------------------------------

    def placeholders(self, who: Who, names: Sequence[str]) -> Placeholders | None:
        return self._secrets.placeholders(who.lineage, names)

    async def admit(self, who: Who, names: Sequence[str]) -> Admitted:
        """Leases and certificates; the interceptor knows the sandbox afterwards, and takes its connections."""
        guest = self._guests.setdefault(who.sandbox, _Guest(who))
        trust = await self._interception.prepare(who, max_age_s=TTL_S_MAX)
        leases = await self._secrets.lease(who.owner, who.tenant, names, sandbox=who.sandbox, lineage=who.lineage)
        try:
            if self._guests.get(who.sandbox) is not guest:  # it ended meanwhile, and its `release` found nothing yet
                raise error("sandbox_ended", f"Sandbox {who.sandbox} ended before it had its secrets.")
            self._interception.sandbox(who, leases)
        except ClocheError:
            self._secrets.release(who.sandbox)
            raise
        guest.admitted.set()
        files = {"trust.pem": trust.pem} | ({"cacerts": trust.java} if trust.java is not None else {})
        return Admitted({lease.name: lease.placeholder for lease in leases}, files)

    async def intercept(
        self, gate_side: InterceptedConnection, who: Who, target: Target, *, tls: bool, rule: str
    ) -> socket.socket:
        """Not before the interceptor knows every secret of the sandbox: what it does not know it would let through."""
        guest = self._guests.get(who.sandbox)
        if guest is None:
            raise _missing()
        try:
            async with asyncio.timeout(ADMISSION_S):
                await guest.admitted.wait()
        except TimeoutError:
            raise error("interceptor_missing", "The sandbox's secrets are not there yet; try again.") from None
        return await self._interception.open(gate_side, who, target, tls=tls, rule=rule)

    def interceptor(self) -> str:
        return self._interception.state()

    def adopted(self, lineages: set[str]) -> None:
        """After a start: placeholders and certificates of lineages that are no more go."""
        self._secrets.keep_lineages(lineages)
        self._interception.keep_lineages(lineages)

    def release(self, who: Who) -> None:
        """At once: when it returns no value of a secret is held for it."""
        if self._guests.pop(who.sandbox, None) is None:
            return
        self._secrets.release(who.sandbox)
        self._interception.forget(who.sandbox)
        if all(each.who.lineage != who.lineage for each in self._guests.values()):
            self._secrets.forget_lineage(who.lineage)

    def _leases_changed(self, sandbox: str, leases: tuple[Lease, ...]) -> None:
        if (guest := self._guests.get(sandbox)) is not None:
            self._interception.sandbox(guest.who, leases)

    async def close(self) -> None:
        """The daemon stops; sandboxes live on, and the next one's gates wait for them."""
        self._secrets.close()
        await self._interception.close()
        self._resolver.close()


def named_presets(asked: Sequence[Asked]) -> list[str]:
    rules = [parse_short(each) if isinstance(each, str) else each for each in asked]
    return [rule.preset for rule in rules if rule.preset is not None]


def limits_within(asked: EgressLimits, most: EgressLimits | None) -> EgressLimits:
    """What was not asked for is as much as the organisation lets; what was, and is more, is refused by name."""
    if most is None:
        return asked
    found: dict[str, object] = {}
    for name in EgressLimits.model_fields:
        wanted, bound = getattr(asked, name), getattr(most, name)
        if bound is not None and (wanted is None or wanted > bound):
            if wanted is not None and name in asked.model_fields_set:
                raise error("policy_refused", f"The organisation's file allows {name} of at most {bound}.")
            wanted = bound
        found[name] = wanted
    return EgressLimits.model_validate(found)


def _missing() -> ClocheError:
    return error("interceptor_missing", "This node cannot look into connections, and a rule or a secret needs it.")


def webhook_of(organisation: Organisation) -> tuple[str, bytes] | None:
    """The organisation's, with its key, read each time: a key can be replaced."""
    hook = organisation.webhook
    return None if hook is None else (hook.url, hook.key_file.read_bytes().strip())
