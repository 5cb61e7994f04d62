"""Defects of what the policy decides: NET-2, NET-3, NET-4 (names and addresses), NET-10, POL-1."""

from types import ModuleType
from typing import Any

from tests.defects.defect import Defect, replace


def allow_by_default(decide: ModuleType) -> None:
    def open_(otherwise: Any) -> Any:
        def decided(self: Any, target: Any, found: Any, *, seen: bool) -> Any:
            import dataclasses

            from cloche_server.policy.model import Effect

            return dataclasses.replace(otherwise(self, target, found, seen=seen), effect=Effect.ALLOW)

        return decided

    replace(decide.Policy, "_otherwise", open_)


def match_any_ending(index: ModuleType) -> None:
    """`evilexample.com` for `*.example.com`."""

    def sloppy(of_host: Any) -> Any:
        def found(self: Any, host: str, *, is_address: bool = False) -> Any:
            below = [each for suffix, placed in self._below.items() if host.endswith(suffix) for each in placed]
            return of_host(self, host, is_address=is_address) or below

        return found

    replace(index.Index, "of_host", sloppy)


def see_no_requests(decide: ModuleType) -> None:
    def as_connected(_: Any) -> Any:
        return lambda self, target, method, path, *, approved=None: self.connect(target)

    replace(decide.Policy, "request", as_connected)


def forget_ports(index: ModuleType) -> None:
    replace(index, "speaks_of", lambda _: lambda rule, port: True)


def see_no_embedded_address(addresses: ModuleType) -> None:
    """An IPv4 address inside an IPv6 one is not looked for."""

    def plain(refusal: Any) -> Any:
        return lambda address, own=(): None if address.version == 6 else refusal(address, own)

    replace(addresses, "refusal", plain)


def take_any_number(names: ModuleType) -> None:
    """As the C library does."""

    def as_libc(_: Any) -> Any:
        def parsed(name: str) -> Any:
            import ipaddress
            import socket

            try:
                address = ipaddress.IPv4Address(socket.inet_aton(name))
            except OSError:
                raise names.BadName("numeric") from None
            return str(address), address

        return parsed

    replace(names, "_version_4", as_libc)


def give_every_name_an_address(decide: ModuleType) -> None:
    replace(decide.Policy, "resolvable", lambda _: lambda self, name: (80, 443))


def let_requests_go_beyond(offers: ModuleType) -> None:
    replace(offers, "narrowed", lambda _: lambda organisation, rule: rule)


def forget_the_denials(decide: ModuleType) -> None:
    """The organisation's denials are not among what is asked."""

    def reordered(_: Any) -> Any:
        def init(self: Any) -> None:
            import dataclasses

            organisation = dataclasses.replace(self.organisation, deny=())
            object.__setattr__(self, "organisation", organisation)
            post_init(self)

        return init

    post_init = decide.Policy.__post_init__
    replace(decide.Policy, "__post_init__", reordered)


TESTS = "tests/unit/policy"
PROMISES = "tests/promises/egress"
DECIDE = "cloche_server.policy.decide"

POLICY = (
    Defect(
        "NET-2/empty-is-all", "NET-2", (f"{TESTS}/test_decide.py::test_empty_is_nothing",), DECIDE, allow_by_default
    ),
    Defect(
        "NET-2/open-at-first",
        "NET-2",
        (f"{PROMISES}/test_attacks_sockets.py::test_an_empty_list_allows_nothing_from_the_first_moment",),
        DECIDE,
        allow_by_default,
    ),
    Defect(
        "NET-3/any-ending",
        "NET-3",
        (f"{PROMISES}/test_attacks_names.py::test_names_that_only_look_allowed_are_refused[endings]",),
        "cloche_server.policy.index",
        match_any_ending,
    ),
    Defect(
        "NET-3/unseen-requests",
        "NET-3",
        (f"{PROMISES}/test_attacks_intercepted.py::test_methods_and_paths_are_held",),
        DECIDE,
        see_no_requests,
    ),
    Defect(
        "NET-3/any-port",
        "NET-3",
        (f"{TESTS}/test_decide.py::test_which_rule_decides",),
        "cloche_server.policy.index",
        forget_ports,
    ),
    Defect(
        "NET-4/embedded",
        "NET-4",
        (f"{TESTS}/test_addresses.py::test_a_refused_address_stays_so_in_every_form",),
        "cloche_server.policy.addresses",
        see_no_embedded_address,
    ),
    Defect(
        "NET-4/any-number",
        "NET-4",
        (f"{PROMISES}/test_attacks_names.py::test_raw_addresses_and_all_their_spellings_are_refused[numbers]",),
        "cloche_server.policy.names",
        take_any_number,
    ),
    Defect(
        "NET-10/every-name",
        "NET-10",
        (f"{TESTS}/test_decide.py::test_which_names_get_an_address",),
        DECIDE,
        give_every_name_an_address,
    ),
    Defect(
        "POL-1/beyond-the-offer",
        "POL-1",
        (f"{TESTS}/test_offers.py::test_a_request_stays_within_the_offer",),
        "cloche_server.policy.offers",
        let_requests_go_beyond,
    ),
    Defect(
        "POL-1/no-denials",
        "POL-1",
        (f"{TESTS}/test_decide.py::test_tiers_in_order",),
        DECIDE,
        forget_the_denials,
    ),
)
