"""Defects of SEC-1, SEC-2, SEC-4 and POL-3 in the daemon: what is sealed, leased, asked and answered."""

import os
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.defects.defect import Defect, replace

BOX = "tests/unit/secrets/test_box.py"
SERVICE = "tests/unit/secrets/test_service.py"
QUEUE = "tests/unit/approvals/test_queue.py"
ASKING = "tests/unit/approvals/test_asking.py"


def seal_for_nobody(sealed: ModuleType) -> None:
    replace(sealed, "about", lambda _: lambda *parts: b"")


def make_a_new_key(box: ModuleType) -> None:
    replace(box, "_read_text", lambda _: lambda path: None)


def show_it(hidden: ModuleType) -> None:
    replace(hidden.Hidden, "__repr__", lambda _: lambda self: repr(bytes(self._held)))


def log_the_address(minting: ModuleType) -> None:
    import logging

    def logged(ask: Any) -> Any:
        def asked(binding: Any, headers: Any, time_s_max: float) -> Any:
            logging.getLogger("cloche").info("asking %s", binding.origin.url)
            return ask(binding, headers, time_s_max)

        return asked

    replace(minting, "_ask", logged)


def one_placeholder_for_all(service: ModuleType) -> None:
    replace(service, "new_placeholder", lambda _: lambda: "cloche_ph_" + "a" * 32)


def forget_placeholders(sealed: ModuleType) -> None:
    replace(sealed.PlaceholderFiles, "read", lambda _: lambda self, lineage: {})


def never_release(service: ModuleType) -> None:
    replace(service.Secrets, "release", lambda _: lambda self, sandbox: None)


def go_on_with_the_removed(leases: ModuleType) -> None:
    replace(leases, "dead", lambda _: lambda lease, renew_at=None: lease)


def never_renew(service: ModuleType) -> None:
    async def nothing(_self: Any, _hold: Any) -> None:
        return

    replace(service.Secrets, "_keep", lambda _: nothing)


def use_it_beyond_its_time(leases: ModuleType) -> None:
    replace(leases, "not_renewed", lambda _: lambda lease, now: lease)


def take_anybodys_command(binding: ModuleType) -> None:
    def as_admin(bind: Any) -> Any:
        def bound(asker: Any, name: str, asked: Any, *, now: float) -> Any:
            return bind(SimpleNamespace(tenant=asker.tenant, owner=asker.owner, is_admin=True), name, asked, now=now)

        return bound

    replace(binding, "bind", as_admin)


def pass_the_environment_on(sources: ModuleType) -> None:
    replace(sources, "clean_environment", lambda _: lambda: dict(os.environ))


def say_yes_to_silence(queue: ModuleType) -> None:
    replace(
        queue.Asked,
        "verdict",
        lambda _: lambda self: queue.Verdict(self.state != "denied", self.by, self.state),
    )


def share_scopes(queue: ModuleType) -> None:
    replace(queue, "_key", lambda _: lambda question: ("", question.host, question.port))


def give_scopes_to_all(queue: ModuleType) -> None:
    replace(
        queue.Queue,
        "ask",
        lambda ask: lambda self, question, **more: ask(self, question, **{**more, "scope_s_max": 600.0}),
    )


def keep_scopes(queue: ModuleType) -> None:
    def kept(void: Any) -> Any:
        def voided(self: Any, sandbox: str, why: str) -> Any:
            scopes = dict(self.scopes)
            ended = void(self, sandbox, why)
            self.scopes.update(scopes)
            return ended

        return voided

    replace(queue.Queue, "void", kept)


def let_anybody_answer(asking: ModuleType) -> None:
    replace(asking, "_may_see", lambda _: lambda asker, asked: True)


def show_what_the_guest_wrote(queue: ModuleType) -> None:
    replace(queue, "_harmless", lambda _: lambda question: question)


def sign_nothing(webhook: ModuleType) -> None:
    replace(webhook, "signature", lambda _: lambda key, at, body: f"t={at},v1=0")


def take_any_key(watching: ModuleType) -> None:
    replace(watching, "SETTLE_S", lambda _: -1.0)


def _defect(name: str, test: str, module: str, patch: Any) -> Defect:
    return Defect(name, name.partition("/")[0], (test,), module, patch)


SECRETS: tuple[Defect, ...] = (
    _defect(
        "SEC-1/sealed-for-nobody",
        f"{SERVICE}::test_files_that_were_swapped_do_not_open",
        "cloche_server.secrets.sealed",
        seal_for_nobody,
    ),
    _defect(
        "SEC-1/new-key",
        f"{BOX}::test_a_copied_data_directory_does_not_open",
        "cloche_server.secrets.box",
        make_a_new_key,
    ),
    _defect(
        "SEC-1/shown-value",
        "tests/unit/secrets/test_hidden.py::test_nothing_that_shows_an_object_shows_the_value",
        "cloche_server.secrets.hidden",
        show_it,
    ),
    _defect(
        "SEC-1/logged-address",
        "tests/unit/secrets/test_nothing_shown.py::test_what_a_source_says_is_in_no_error",
        "cloche_server.secrets.minting",
        log_the_address,
    ),
    _defect(
        "SEC-2/one-placeholder",
        f"{SERVICE}::test_a_lineage_has_one_placeholder_each_also_after_a_restart",
        "cloche_server.secrets.service",
        one_placeholder_for_all,
    ),
    _defect(
        "SEC-2/forgotten-placeholder",
        f"{SERVICE}::test_a_lineage_has_one_placeholder_each_also_after_a_restart",
        "cloche_server.secrets.sealed",
        forget_placeholders,
    ),
    _defect(
        "SEC-4/endless-lease",
        f"{SERVICE}::test_the_end_of_a_sandbox_ends_its_leases_at_once",
        "cloche_server.secrets.service",
        never_release,
    ),
    _defect(
        "SEC-4/removed-and-used",
        f"{SERVICE}::test_removing_a_secret_takes_it_from_those_who_hold_it",
        "cloche_server.secrets.leases",
        go_on_with_the_removed,
    ),
    _defect(
        "SEC-4/never-renewed",
        f"{SERVICE}::test_a_minted_value_is_renewed_before_it_ends",
        "cloche_server.secrets.service",
        never_renew,
    ),
    _defect(
        "SEC-4/beyond-its-time",
        f"{SERVICE}::test_a_source_that_fails_ends_the_value_at_its_time",
        "cloche_server.secrets.leases",
        use_it_beyond_its_time,
    ),
    _defect(
        "SEC-4/anybodys-command",
        "tests/unit/secrets/test_binding.py::test_what_the_node_does_itself_only_its_operator_asks_for",
        "cloche_server.secrets.binding",
        take_anybodys_command,
    ),
    _defect(
        "SEC-4/daemons-environment",
        "tests/unit/secrets/test_sources.py::test_a_command_gives_its_output_and_gets_nothing_of_ours",
        "cloche_server.secrets.sources",
        pass_the_environment_on,
    ),
    _defect(
        "POL-3/silence-is-yes",
        f"{ASKING}::test_without_a_person_it_is_a_no_after_its_time",
        "cloche_server.approvals.queue",
        say_yes_to_silence,
    ),
    _defect(
        "POL-3/scope-of-all",
        f"{QUEUE}::test_a_scope_is_of_one_sandbox_host_and_port",
        "cloche_server.approvals.queue",
        share_scopes,
    ),
    _defect(
        "POL-3/scope-unasked",
        f"{ASKING}::test_a_scope_that_the_organisation_does_not_allow_is_no_answer",
        "cloche_server.approvals.queue",
        give_scopes_to_all,
    ),
    _defect(
        "POL-3/scope-outlives-its-policy",
        f"{QUEUE}::test_void_takes_questions_and_scopes_of_that_sandbox_alone",
        "cloche_server.approvals.queue",
        keep_scopes,
    ),
    _defect(
        "POL-3/anybody-answers",
        f"{ASKING}::test_others_neither_see_nor_answer_it",
        "cloche_server.approvals.asking",
        let_anybody_answer,
    ),
    _defect(
        "POL-3/guests-own-words",
        f"{QUEUE}::test_what_a_guest_chose_is_shown_harmless_and_short",
        "cloche_server.approvals.queue",
        show_what_the_guest_wrote,
    ),
    _defect(
        "POL-3/unsigned-webhook",
        "tests/unit/approvals/test_webhook.py::test_it_is_told_signed_and_its_token_answers_once",
        "cloche_server.approvals.webhook",
        sign_nothing,
    ),
    _defect(
        "POL-3/key-for-the-next",
        "tests/unit/cli/test_approvals.py::test_a_key_answers_only_what_was_seen_for_a_moment",
        "cloche.cli.watching",
        take_any_key,
    ),
)
