"""Defects of the way out, each of which lets one known attack through (tests/promises/attacks.toml): sockets, time, addresses."""

import dataclasses
from types import ModuleType
from typing import Any

from tests.defects.defect import Defect, of_one_test, replace
from tests.defects.egress import check_no_address, dial_loopback_only
from tests.defects.policy import allow_by_default, give_every_name_an_address

PROMISES = "tests/promises/egress"
ADDRESSES = f"{PROMISES}/test_attacks_addresses.py"
SOCKETS = f"{PROMISES}/test_attacks_sockets.py"
LED_AWAY = f"{ADDRESSES}::test_metadata_by_alias_and_by_redirect"
FAMILIES = f"{SOCKETS}::test_no_socket_of_any_family_reaches_anything"
CHECK = "cloche_server.egress.steps.check"
DECIDE = "cloche_server.policy.decide"
GATE = "cloche_server.egress.gate"
GVISOR = "cloche_server.engines.gvisor.command"


def _allowing(decide: ModuleType) -> type:
    """A policy that allows whatever no rule denies."""
    from cloche_server.policy.model import Effect

    class Open(decide.Policy):  # type: ignore[name-defined,misc]
        def _otherwise(self, target: Any, found: Any, *, seen: bool) -> Any:
            decision = super()._otherwise(target, found, seen=seen)
            return dataclasses.replace(decision, effect=Effect.ALLOW, carries=decide._web(target.port))

        def resolvable(self, name: str) -> tuple[int, ...]:
            return (443, 80)

    return Open


def _opened(policy: Any) -> Any:
    from cloche_server.policy import decide

    return _allowing(decide)(policy.organisation, policy.asked, policy.grants, policy.intercept_hosts)


# -------------------------------------------------------------------------------- who asks, and when


def share_the_hosts_network(command: ModuleType) -> None:
    replace(command, "FLAGS", lambda flags: tuple(flag.replace("--network=none", "--network=host") for flag in flags))

    def without_its_own(config: Any) -> Any:
        def made(spec: Any, places: Any) -> Any:
            found = config(spec, places)
            kinds = found["linux"]["namespaces"]
            found["linux"]["namespaces"] = [each for each in kinds if each["type"] != "network"]
            return found

        return made

    replace(command, "config", without_its_own)


def judge_nobody_who_comes_by_name(connect: ModuleType) -> None:
    """The proxy is watched, and who leaves it aside is not."""

    def unjudged(of: Any) -> Any:
        def conversation(fields: Any) -> Any:
            talk = of(fields)

            async def converse(gate: Any, guest: Any) -> None:
                policy, gate.policy = gate.policy, _opened(gate.policy)
                try:
                    await talk(gate, guest)
                finally:
                    gate.policy = policy

            return None if talk is None else converse

        return conversation

    from cloche_server.policy import decide

    replace(connect, "of", unjudged)
    give_every_name_an_address(decide)


def open_the_gate_before_its_policy(gate: ModuleType) -> None:
    """The policy comes three seconds after the sandbox."""

    def dated(init: Any) -> Any:
        def made(self: Any, *args: Any, **named: Any) -> None:
            init(self, *args, **named)
            policy, self.policy = self.policy, _opened(self.policy)
            self._loop.call_later(3.0, lambda: setattr(self, "policy", policy))

        return made

    replace(gate.Gate, "__init__", dated)


def restore_another_policy(way: ModuleType) -> None:
    """The next daemon goes on with what it thinks that it remembers."""

    def forgetful(of_stored: Any) -> Any:
        def plan(stored: Any) -> Any:
            found = of_stored(stored)
            return dataclasses.replace(found, policy=_opened(found.policy))

        return plan

    replace(way.Plan, "of_stored", lambda of_stored: staticmethod(forgetful(of_stored)))


def wait_for_everybody(gate: ModuleType) -> None:
    replace(gate, "WAITING_MAX", lambda _: 1 << 30)


def wait_for_ever(talk: ModuleType) -> None:
    replace(talk, "HEAD_S", lambda _: 600.0)
    replace(talk, "FIRST_BYTE_S", lambda _: 600.0)


# --------------------------------------------------------------------------------- addresses


def refuse_only_metadata(check: ModuleType) -> None:
    def short(refusal: Any) -> Any:
        return lambda address, own=(): "metadata" if refusal(address) == "metadata" else None

    replace(check, "refusal", short)
    dial_loopback_only()


def trust_the_sandbox(decide: ModuleType) -> None:
    """It may say itself what it may reach, and where that is."""
    from cloche_server.egress.steps import check

    check_no_address(check)
    allow_by_default(decide)
    give_every_name_an_address(decide)


def dial_somebody_else_too(dial: ModuleType) -> None:
    """To see whether there is a network."""

    def also(step: Any) -> Any:
        async def dialled(attempt: Any) -> None:
            import ipaddress
            from contextlib import suppress

            from cloche_server.egress import sockets

            with suppress(sockets.DialFailed):
                sock, _ = await sockets.dial([ipaddress.ip_address("127.0.0.1")], 9)
                sock.close()
            await step(attempt)

        return dialled

    replace(dial, "step", also)


# --------------------------------------------------------------------------- without an interceptor


def see_nothing_after_a_death(gate: ModuleType) -> None:
    """An interceptor that died once is not waited for."""

    def once(intercept: Any) -> Any:
        async def looked_into(self: Any, attempt: Any, *, tls: bool) -> None:
            from cloche_server.egress import steps

            tenants = self.services.interception._ways._interception._tenants
            if any(each.deaths for each in tenants.values()):
                await steps.run_later(attempt)
            else:
                await intercept(self, attempt, tls=tls)

        return looked_into

    replace(gate.Gate, "intercept", once)


def do_without(supervisor: ModuleType) -> None:
    """Where no interceptor can run the connection is there all the same."""

    def open_all_the_same(open_: Any) -> Any:
        async def opened(self: Any, *args: Any, **named: Any) -> Any:
            import socket

            from cloche.wire.errors import ClocheError

            try:
                return await open_(self, *args, **named)
            except ClocheError:
                return socket.socketpair()[0]

        return opened

    replace(supervisor.Interception, "open", open_all_the_same)


ATTACKS: tuple[Defect, ...] = (
    of_one_test("NET-1/hosts-network", f"{FAMILIES}[families]", GVISOR, share_the_hosts_network),
    of_one_test("NET-1/hosts-network-tcp", f"{FAMILIES}[tcp]", GVISOR, share_the_hosts_network),
    of_one_test("NET-1/hosts-network-udp", f"{FAMILIES}[udp-icmp]", GVISOR, share_the_hosts_network),
    of_one_test(
        "NET-1/unjudged-by-name",
        f"{SOCKETS}::test_without_its_variables_a_program_reaches_no_more",
        "cloche_server.egress.conversations.connect",
        judge_nobody_who_comes_by_name,
    ),
    of_one_test(
        "NET-2/late-policy",
        f"{SOCKETS}::test_an_empty_list_allows_nothing_from_the_first_moment",
        GATE,
        open_the_gate_before_its_policy,
    ),
    of_one_test(
        "NET-2/sandbox-decides",
        f"{SOCKETS}::test_a_cloned_repository_that_asks_for_everything",
        DECIDE,
        trust_the_sandbox,
    ),
    of_one_test(
        "NET-4/metadata-only", f"{ADDRESSES}::test_the_host_itself_is_out_of_reach", CHECK, refuse_only_metadata
    ),
    of_one_test("NET-4/unchecked-alias", f"{LED_AWAY}[alias]", CHECK, check_no_address),
    of_one_test("NET-4/unjudged-redirect", f"{LED_AWAY}[redirect]", DECIDE, allow_by_default),
    of_one_test(
        "NET-4/unchecked-probe",
        f"{PROMISES}/test_daemon_sockets.py::test_the_daemon_connects_only_to_what_was_checked",
        "cloche_server.egress.steps.dial",
        dial_somebody_else_too,
    ),
    of_one_test("NET-8/everybody-waits", f"{SOCKETS}::test_ten_thousand_half_open_streams", GATE, wait_for_everybody),
    of_one_test(
        "NET-8/endless-patience",
        f"{SOCKETS}::test_a_slow_head_is_given_up",
        "cloche_server.egress.conversations.talk",
        wait_for_ever,
    ),
    of_one_test(
        "NET-9/another-policy",
        f"{PROMISES}/test_kills.py::test_the_gate_dies",
        "cloche_server.node.way",
        restore_another_policy,
    ),
    of_one_test(
        "NET-9/unseen-after-a-death",
        f"{PROMISES}/test_kills.py::test_the_interceptor_dies",
        GATE,
        see_nothing_after_a_death,
    ),
    of_one_test(
        "NET-9/done-without",
        f"{PROMISES}/test_interceptor_walls.py::test_without_a_python_it_is_missing_by_name",
        "cloche_server.egress.interception.supervisor",
        do_without,
    ),
)
