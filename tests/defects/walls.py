"""Defects of ISO, FS and RES: what stands between a sandbox and everything else."""

import dataclasses
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.defects.defect import Defect, replace

# ------------------------------------------------------------------------------------ ISO


def share_the_kernel(command: ModuleType) -> None:
    script = str(Path(__file__).with_name("shared_kernel.py"))
    python = os.path.realpath(sys.executable)

    def container(plan: Any) -> Any:
        def planned(spec: Any, places: Any) -> Any:
            from cloche_server.keeper import spawn

            spawn.NOBODY = 1000  # type: ignore[misc]  # the id that the image's user has: commands can run
            agent = f"{places.engine}/cloche-guest-{os.uname().machine}"
            return dataclasses.replace(
                plan(spec, places), argv=(python, "-I", "-S", script, places.work, agent, spec.id)
            )

        return planned

    replace(command, "plan", container)


def lose_a_flag(command: ModuleType) -> None:
    replace(command, "FLAGS", lambda flags: tuple(flag for flag in flags if not flag.startswith("--host-settings")))


def let_everyone_see_all(roster: ModuleType) -> None:
    replace(roster, "may_see", lambda _: lambda caller, owner, tenant: True)


def believe_that_everyone_is_root(caller: ModuleType) -> None:
    replace(caller, "_local_user", lambda local_user: lambda uid, rules: local_user(0, rules))


def give_all_the_same_ids(serve: ModuleType) -> None:
    replace(serve.Keeper, "_free_slot", lambda _: lambda self: self._house.first_slot)


def stay_in_the_keepers_cgroup(cgroups: ModuleType) -> None:
    replace(cgroups.Cgroup, "enter", lambda _: lambda self: None)


def accept_any_release(engine: ModuleType) -> None:
    replace(engine, "FLOOR", lambda _: 0)


def bind_a_host_directory(command: ModuleType) -> None:
    shared = {"destination": "/mnt", "type": "bind", "source": "/etc", "options": ["rbind", "ro"]}
    replace(command, "_mounts", lambda mounts: lambda spec, places: [*mounts(spec, places), shared])


def hand_down_the_environment(booting: ModuleType) -> None:
    def with_ours(bind_fields: Any) -> Any:
        def fields(*arguments: Any) -> Any:
            found = bind_fields(*arguments)
            return {**found, "env": {**os.environ, **found["env"]}}

        return fields

    replace(booting, "bind_fields", with_ours)


def keep_privileges(up: ModuleType) -> None:
    def only_the_user(_: Any) -> Any:
        def drop(uid: int, gid: int) -> None:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)

        return drop

    replace(up, "drop_privileges", only_the_user)


def take_any_path_for_an_image(spec: ModuleType) -> None:
    replace(spec, "IMAGE_FILE", lambda _: re.compile(".*", re.DOTALL))


def take_objects_of_any_depth(frames: ModuleType) -> None:
    replace(frames, "_check_depth", lambda _: lambda value: None)


def leave_commands_capable(sandbox: ModuleType) -> None:
    def more(exec_fields: Any) -> Any:
        return lambda self, *arguments: {**exec_fields(self, *arguments), "privileges": "package-install"}

    replace(sandbox.Sandbox, "_exec_fields", more)


# ------------------------------------------------------------------------------------- FS


def ask_for_a_plain_tmp(booting: ModuleType) -> None:
    def plain(bind_fields: Any) -> Any:
        return lambda *arguments: {**bind_fields(*arguments), "tmp": {"noexec": False, "size_bytes": None}}

    replace(booting, "bind_fields", plain)


def give_the_layer_no_limit(command: ModuleType) -> None:
    def endless(config: Any) -> Any:
        def made(spec: Any, places: Any) -> Any:
            found = config(spec, places)
            del found["annotations"]["dev.gvisor.spec.rootfs.options"]
            return found

        return made

    replace(command, "config", endless)


def follow_links_on_the_way(extract: ModuleType) -> None:
    replace(extract, "_DIRECTORY", lambda flags: flags & ~os.O_NOFOLLOW)


def make_any_link(extract: ModuleType) -> None:
    replace(extract, "stays_inside", lambda _: lambda target, depth: True)


# ------------------------------------------------------------------------------------ RES


def write_no_memory_limit(cgroups: ModuleType) -> None:
    def without(limits: Any) -> Any:
        return lambda version, spec: [write for write in limits(version, spec) if not write.file.startswith("memory.")]

    replace(cgroups, "limits", without)


def allow_any_number_of_processes(booting: ModuleType) -> None:
    def unlimited(bind_fields: Any) -> Any:
        def fields(*arguments: Any) -> Any:
            found = bind_fields(*arguments)
            return {**found, "limits": {**found["limits"], "processes": 1 << 20}}

        return fields

    replace(booting, "bind_fields", unlimited)


def log_without_end(command_log: ModuleType) -> None:
    replace(command_log.CommandLog, "room", lambda _: lambda self, fd, wanted=1: 1 << 62)


def forget_deadlines(sandbox: ModuleType) -> None:
    replace(sandbox.Sandbox, "_deadline_due", lambda _: lambda self: None)


def never_look_at_the_clock(keeping: ModuleType) -> None:
    replace(keeping.Agenda, "run_due", lambda _: lambda self: 0)


WALLS = (
    Defect(
        "ISO-1/shared-kernel",
        "ISO-1",
        ("tests/promises/test_vertical.py::test_the_kernel_inside_is_not_the_hosts",),
        "cloche_server.engines.gvisor.command",
        share_the_kernel,
    ),
    Defect(
        "ISO-1/lost-flag",
        "ISO-1",
        ("tests/unit/keeper/test_command.py::test_argv",),
        "cloche_server.engines.gvisor.command",
        lose_a_flag,
    ),
    Defect(
        "ISO-3/no-owner-check",
        "ISO-3",
        ("tests/contract/test_backend.py::test_everyone_sees_his_own",),
        "cloche_server.node.roster",
        let_everyone_see_all,
    ),
    Defect(
        "ISO-3/everyone-is-root",
        "ISO-3",
        ("tests/contract/test_api.py::test_a_user_sees_only_his_own",),
        "cloche_server.api.caller",
        believe_that_everyone_is_root,
    ),
    Defect(
        "ISO-4/one-uid-for-all",
        "ISO-4",
        ("tests/promises/test_walls.py::test_each_has_a_uid_of_its_own",),
        "cloche_server.keeper.serve",
        give_all_the_same_ids,
    ),
    Defect(
        "ISO-4/no-cgroup",
        "ISO-4",
        ("tests/promises/test_walls.py::test_limits_are_set_from_outside",),
        "cloche_server.keeper.cgroups",
        stay_in_the_keepers_cgroup,
    ),
    Defect(
        "ISO-5/no-floor",
        "ISO-5",
        ("tests/unit/keeper/test_command.py::test_an_old_engine_is_refused",),
        "cloche_server.engines.gvisor.engine",
        accept_any_release,
    ),
    Defect(
        "ISO-6/host-directory",
        "ISO-6",
        ("tests/promises/test_inside.py::test_no_mount_is_the_hosts",),
        "cloche_server.engines.gvisor.command",
        bind_a_host_directory,
    ),
    Defect(
        "ISO-6/host-environment",
        "ISO-6",
        ("tests/promises/test_inside.py::test_the_environment_is_what_was_set_and_nothing_else",),
        "cloche_server.node.booting",
        hand_down_the_environment,
    ),
    Defect(
        "ISO-7/privileged-daemon",
        "ISO-7",
        ("tests/promises/test_walls.py::test_daemon_and_keeper_have_no_capability_outside",),
        "cloche_server.node.launch.up",
        keep_privileges,
    ),
    Defect(
        "ISO-7/any-path",
        "ISO-7",
        ("tests/unit/keeper/test_verbs.py::test_no_path_leaves_the_images",),
        "cloche_server.engines.spec",
        take_any_path_for_an_image,
    ),
    Defect(
        "ISO-7/any-depth",
        "ISO-7",
        ("tests/unit/channel/test_frames.py::test_hostile_json_is_a_bad_frame",),
        "cloche_server.channel.frames",
        take_objects_of_any_depth,
    ),
    Defect(
        "ISO-8/capable-commands",
        "ISO-8",
        ("tests/promises/test_inside.py::test_no_capability_in_any_set_and_no_way_to_new_ones",),
        "cloche_server.node.sandbox",
        leave_commands_capable,
    ),
    Defect(
        "FS-1/plain-tmp",
        "FS-1",
        ("tests/promises/test_inside.py::test_tmp_has_no_set_user_id_and_no_devices",),
        "cloche_server.node.booting",
        ask_for_a_plain_tmp,
    ),
    Defect(
        "FS-1/endless-layer",
        "FS-1",
        ("tests/promises/test_files.py::test_the_writable_layer_has_a_limit",),
        "cloche_server.engines.gvisor.command",
        give_the_layer_no_limit,
    ),
    Defect(
        "FS-2/followed-link",
        "FS-2",
        ("tests/unit/client/test_extract.py::test_nothing_outside_its_place",),
        "cloche.client._extract",
        follow_links_on_the_way,
    ),
    Defect(
        "FS-2/any-link",
        "FS-2",
        ("tests/unit/client/test_extract.py::test_nothing_outside_its_place",),
        "cloche.client._extract",
        make_any_link,
    ),
    Defect(
        "RES-1/no-memory-limit",
        "RES-1",
        ("tests/unit/keeper/test_live.py::test_out_of_memory_is_counted",),
        "cloche_server.keeper.cgroups",
        write_no_memory_limit,
    ),
    Defect(
        "RES-1/no-process-limit",
        "RES-1",
        ("tests/promises/test_lifecycle.py::test_a_fork_bomb_gets_an_error_and_its_sandbox_lives",),
        "cloche_server.node.booting",
        allow_any_number_of_processes,
    ),
    Defect(
        "RES-1/endless-log",
        "RES-1",
        ("tests/unit/node/test_command_log.py::test_end_keeps_exactly_the_limit",),
        "cloche_server.node.command_log",
        log_without_end,
    ),
    Defect(
        "RES-2/no-deadline",
        "RES-2",
        ("tests/promises/test_ends.py::test_a_frozen_guest_lives_no_longer_than_its_ttl",),
        "cloche_server.node.sandbox",
        forget_deadlines,
    ),
    Defect(
        "RES-2/no-clock",
        "RES-2",
        ("tests/unit/node/test_keeping.py::test_deadlines_come_in_order_and_cancelled_ones_never",),
        "cloche_server.node.keeping",
        never_look_at_the_clock,
    ),
)
