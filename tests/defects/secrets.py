"""Defects of SEC-1, SEC-2, SEC-4 and POL-3 in the daemon: what is sealed, leased, asked and answered."""

import os
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.defects.defect import Defect, of_one_test, replace

BOX = "tests/unit/secrets/test_box.py"
SERVICE = "tests/unit/secrets/test_service.py"
QUEUE = "tests/unit/approvals/test_queue.py"
ASKING = "tests/unit/approvals/test_asking.py"
LEASES = "tests/promises/egress/test_secrets_leases.py"
APPROVALS = "tests/promises/egress/test_approvals.py"


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


def show_what_the_guest_wrote(text: ModuleType) -> None:
    replace(text, "escaped", lambda _: lambda text, chars_max=500: text[:chars_max])


def hold_to_the_name(resolve: ModuleType) -> None:
    """The address that the person saw is not looked at again."""

    def by_name(step: Any) -> Any:
        async def resolved(attempt: Any) -> None:
            shown, attempt.shown = attempt.shown, None
            await step(attempt)
            attempt.shown = shown

        return resolved

    replace(resolve, "step", by_name)


def approve_for_ever(queue: ModuleType) -> None:
    def with_scope(answer: Any) -> Any:
        def answered(self: Any, asked: Any, *, approve: bool, by: str, now: float, scope_s: float | None = None) -> Any:
            if approve:
                self._add_scope(asked, 600.0, by, now)
            return answer(self, asked, approve=approve, by=by, now=now, scope_s=scope_s)

        return answered

    replace(queue.Queue, "answer", with_scope)


def keep_questions(queue: ModuleType) -> None:
    """What waits goes on waiting under another policy."""

    def kept(_: Any) -> Any:
        def voided(self: Any, sandbox: str, why: str) -> Any:
            self.scopes = {key: scope for key, scope in self.scopes.items() if key[0] != sandbox}
            return []

        return voided

    replace(queue.Queue, "void", kept)


def take_the_value_inside(way: ModuleType) -> None:
    def with_values(prepare: Any) -> Any:
        async def prepared(self: Any) -> Any:
            import dataclasses

            inside = await prepare(self)
            leases = self._ways._secrets.leases(self.who.sandbox)
            values = {f"{lease.name}_REAL": lease.value.reveal().decode() for lease in leases}
            return dataclasses.replace(inside, env={**inside.env, **values})

        return prepared

    replace(way.Way, "prepare", with_values)


def journal_the_value(service: ModuleType) -> None:
    def with_values(tell_of: Any) -> Any:
        def told(self: Any, kind: str, hold: Any, detail: Any) -> None:
            values = [each.value.reveal().decode() for each in hold.leases.values()] if kind == "secret.leased" else []
            tell_of(self, kind, hold, {**detail, "values": values})

        return told

    replace(service.Secrets, "_tell_of", with_values)


def keep_the_key_with_the_data(box: ModuleType) -> None:
    def beside(make: Any) -> Any:
        return lambda self, key_file, id_file: make(self, id_file.with_name("secrets.key"), id_file)

    replace(box.Box, "__init__", beside)


def sign_nothing(webhook: ModuleType) -> None:
    replace(webhook, "signature", lambda _: lambda key, at, body: f"t={at},v1=0")


def take_any_key(watching: ModuleType) -> None:
    replace(watching, "SETTLE_S", lambda _: -1.0)


SECRETS: tuple[Defect, ...] = (
    of_one_test(
        "SEC-1/sealed-for-nobody",
        f"{SERVICE}::test_files_that_were_swapped_do_not_open",
        "cloche_server.secrets.sealed",
        seal_for_nobody,
    ),
    of_one_test(
        "SEC-1/new-key",
        f"{BOX}::test_a_copied_data_directory_does_not_open",
        "cloche_server.secrets.box",
        make_a_new_key,
    ),
    of_one_test(
        "SEC-1/shown-value",
        "tests/unit/secrets/test_hidden.py::test_nothing_that_shows_an_object_shows_the_value",
        "cloche_server.secrets.hidden",
        show_it,
    ),
    of_one_test(
        "SEC-1/logged-address",
        "tests/unit/secrets/test_nothing_shown.py::test_what_a_source_says_is_in_no_error",
        "cloche_server.secrets.minting",
        log_the_address,
    ),
    of_one_test(
        "SEC-2/one-placeholder",
        f"{SERVICE}::test_a_lineage_has_one_placeholder_each_also_after_a_restart",
        "cloche_server.secrets.service",
        one_placeholder_for_all,
    ),
    of_one_test(
        "SEC-2/forgotten-placeholder",
        f"{SERVICE}::test_a_lineage_has_one_placeholder_each_also_after_a_restart",
        "cloche_server.secrets.sealed",
        forget_placeholders,
    ),
    of_one_test(
        "SEC-4/endless-lease",
        f"{SERVICE}::test_the_end_of_a_sandbox_ends_its_leases_at_once",
        "cloche_server.secrets.service",
        never_release,
    ),
    of_one_test(
        "SEC-4/removed-and-used",
        f"{SERVICE}::test_removing_a_secret_takes_it_from_those_who_hold_it",
        "cloche_server.secrets.leases",
        go_on_with_the_removed,
    ),
    of_one_test(
        "SEC-4/never-renewed",
        f"{SERVICE}::test_a_minted_value_is_renewed_before_it_ends",
        "cloche_server.secrets.service",
        never_renew,
    ),
    of_one_test(
        "SEC-4/beyond-its-time",
        f"{SERVICE}::test_a_source_that_fails_ends_the_value_at_its_time",
        "cloche_server.secrets.leases",
        use_it_beyond_its_time,
    ),
    of_one_test(
        "SEC-4/anybodys-command",
        "tests/unit/secrets/test_binding.py::test_what_the_node_does_itself_only_its_operator_asks_for",
        "cloche_server.secrets.binding",
        take_anybodys_command,
    ),
    of_one_test(
        "SEC-4/daemons-environment",
        "tests/unit/secrets/test_sources.py::test_a_command_gives_its_output_and_gets_nothing_of_ours",
        "cloche_server.secrets.sources",
        pass_the_environment_on,
    ),
    of_one_test(
        "POL-3/silence-is-yes",
        f"{ASKING}::test_without_a_person_it_is_a_no_after_its_time",
        "cloche_server.approvals.queue",
        say_yes_to_silence,
    ),
    of_one_test(
        "POL-3/scope-of-all",
        f"{APPROVALS}::test_an_approval_is_for_one_action_and_a_scope_for_one_sandbox",
        "cloche_server.approvals.queue",
        share_scopes,
    ),
    of_one_test(
        "POL-3/scope-unasked",
        f"{ASKING}::test_a_scope_that_the_organisation_does_not_allow_is_no_answer",
        "cloche_server.approvals.queue",
        give_scopes_to_all,
    ),
    of_one_test(
        "POL-3/scope-outlives-its-policy",
        f"{APPROVALS}::test_a_change_of_policy_voids_what_waits_and_what_was_given",
        "cloche_server.approvals.queue",
        keep_scopes,
    ),
    of_one_test(
        "POL-3/anybody-answers",
        f"{ASKING}::test_others_neither_see_nor_answer_it",
        "cloche_server.approvals.asking",
        let_anybody_answer,
    ),
    of_one_test(
        "POL-3/guests-own-words",
        f"{APPROVALS}::test_what_a_guest_writes_cannot_act_on_the_screen_of_who_decides",
        "cloche_server.egress.text",
        show_what_the_guest_wrote,
    ),
    of_one_test(
        "POL-3/name-not-address",
        f"{APPROVALS}::test_a_name_that_changes_after_the_approval_reaches_nobody",
        "cloche_server.egress.steps.resolve",
        hold_to_the_name,
    ),
    of_one_test(
        "POL-3/once-is-for-ever",
        f"{APPROVALS}::test_an_approval_is_for_one_action_and_a_scope_for_one_sandbox",
        "cloche_server.approvals.queue",
        approve_for_ever,
    ),
    of_one_test(
        "POL-3/question-outlives-its-policy",
        f"{APPROVALS}::test_a_change_of_policy_voids_what_waits_and_what_was_given",
        "cloche_server.approvals.queue",
        keep_questions,
    ),
    of_one_test(
        "SEC-1/value-inside",
        f"{LEASES}::test_no_page_or_file_of_the_guest_holds_the_value",
        "cloche_server.node.way",
        take_the_value_inside,
    ),
    of_one_test(
        "SEC-1/value-in-a-checkpoint",
        f"{LEASES}::test_no_checkpoint_image_holds_the_value",
        "cloche_server.node.way",
        take_the_value_inside,
    ),
    of_one_test(
        "SEC-1/value-in-the-journal",
        f"{LEASES}::test_no_file_log_record_or_answer_holds_the_value",
        "cloche_server.secrets.service",
        journal_the_value,
    ),
    of_one_test(
        "SEC-1/key-with-the-data",
        f"{LEASES}::test_a_copied_data_directory_does_not_open",
        "cloche_server.secrets.box",
        keep_the_key_with_the_data,
    ),
    of_one_test(
        "POL-3/unsigned-webhook",
        "tests/unit/approvals/test_webhook.py::test_it_is_told_signed_and_its_token_answers_once",
        "cloche_server.approvals.webhook",
        sign_nothing,
    ),
    of_one_test(
        "POL-3/key-for-the-next",
        "tests/unit/cli/test_approvals.py::test_a_key_answers_only_what_was_seen_for_a_moment",
        "cloche.cli.watching",
        take_any_key,
    ),
)
