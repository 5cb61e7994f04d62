"""What the launcher decides before anything starts, and what the doctor says: pure parts, and named refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cloche.wire.errors import TABLE, ClocheError
from cloche_server.node import host
from cloche_server.node.launch import prepare, reach
from cloche_server.node.launch.cgroup import own_v2
from cloche_server.node.launch.ids import IdRange, choose_range, machine_range, parse_subids
from cloche_server.node.launch.places import NodePaths


def test_subids_are_read_by_name_and_by_number() -> None:
    text = "ann:100000:65536\n1002:165536:65536\n# note\nbroken:x:1\nbob:300000:10\n"
    assert parse_subids(text, ("ann", "1001")) == [IdRange(100000, 65536)]
    assert parse_subids(text, ("zoe", "1002")) == [IdRange(165536, 65536)]
    assert len(parse_subids(text)) == 3


def test_a_chosen_range_is_nobody_elses() -> None:
    first = choose_range([], "/var/lib/cloche")
    again = choose_range([], "/var/lib/cloche")
    other = choose_range([first], "/var/lib/cloche")
    assert first == again
    assert not first.overlaps(other)
    assert choose_range([], "/another") != first
    assert first.first > 65536 * 1000


def test_a_range_is_recorded_before_use(tmp_path: Path) -> None:
    record = tmp_path / "ids.json"
    chosen = machine_range(record)
    assert json.loads(record.read_text()) == {"first": chosen.first, "count": chosen.count}
    assert machine_range(record) == chosen


def test_the_map_names_the_user_and_the_range() -> None:
    assert IdRange(400000, 65536).map_text(999) == "0 999 1\n1 400000 65536\n"


@pytest.mark.parametrize(
    ("text", "own"), [("0::/user.slice/x.scope\n", "/user.slice/x.scope"), ("9:pids:/a\n0::/\n", "/")]
)
def test_own_cgroup(text: str, own: str) -> None:
    assert own_v2(text) == own


@pytest.mark.req("UX-7")
def test_nothing_unknown_can_be_given_up() -> None:
    prepare.check_accept(("no-cgroup",))
    for names, code in ((("no-seccomp",), "invalid_request"), (("single-uid",), "unsupported")):
        with pytest.raises(ClocheError) as caught:
            prepare.check_accept(names)
        assert caught.value.code == code


@pytest.mark.req("UX-8")
@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"userns_obstacle": lambda: "kernel.unprivileged_userns_clone is 0"}, "userns_forbidden"),
        ({"which": None}, "no_newuidmap"),
        ({"own_range": lambda *_: None}, "no_subuids"),
        ({"find": (None, "nothing delegated")}, "no_cgroup_delegation"),
    ],
)
def test_what_is_missing_has_a_name(
    change: dict[str, object], code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    which, find = change.get("which", "/usr/bin/newuidmap"), change.get("find", (object(), "v1"))
    monkeypatch.setattr(prepare, "userns_obstacle", change.get("userns_obstacle", lambda: None))
    monkeypatch.setattr("shutil.which", lambda *_, **__: which)
    monkeypatch.setattr(prepare, "own_range", change.get("own_range", lambda *_: IdRange(100000, 65536)))
    monkeypatch.setattr("cloche_server.node.launch.cgroup.find", lambda _: find)
    with pytest.raises(ClocheError) as caught:
        prepare.prepare_user(NodePaths(tmp_path / "state", tmp_path / "run", tmp_path, config_dir=tmp_path / "config"))
    assert caught.value.code == code
    assert not (tmp_path / "state").exists()


def test_a_closed_directory_is_found(tmp_path: Path) -> None:
    inner = tmp_path / "home" / "venv"
    inner.mkdir(parents=True)
    (tmp_path / "home").chmod(0o700)
    stranger = 54321
    assert reach.closed_ancestor(Path("/usr"), stranger, stranger) is None
    found = reach.closed_ancestor(inner, stranger, stranger)
    assert found is not None
    assert inner.is_relative_to(found)


GOOD = host.Host(
    kernel="6.1.0-18-amd64", machine="x86_64", root=False, user="ann", uid=1000, runsc="release-20260905.0",
    runsc_digest="0" * 64, runsc_problem=None, cgroup_version=2, cgroup_found=True, cgroup_text="v2, /x", newuidmap=True,
    ids=IdRange(100000, 65536), kvm=False, files={"smt": "0", "ksm": "0", "swaps": "Filename\n", "core_pattern": "core"},
)  # fmt: skip


def judged(**changes: object) -> dict[str, host.Check]:
    one = dataclasses.replace(GOOD, **changes)  # type: ignore[arg-type]
    return {check.name: check for check in (judge(one) for judge in host.CHECKS)}


def test_a_good_host() -> None:
    assert {check.status for name, check in judged().items() if name != "node-user"} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "name", "status"),
    [
        ({"kernel": "4.19.0"}, "kernel", "fail"),
        ({"machine": "aarch64"}, "architecture", "fail"),
        ({"runsc_problem": ("engine_too_old", "runsc is release-20240729.0")}, "engine", "fail"),
        ({"cgroup_found": False, "cgroup_text": "none"}, "cgroup", "fail"),
        ({"cgroup_version": 1}, "cgroup", "warn"),
        ({"newuidmap": False}, "subuids", "fail"),
        ({"ids": None}, "subuids", "fail"),
        ({"sysctls": {"/proc/sys/user/max_user_namespaces": "0"}}, "user-namespaces", "fail"),
        ({"sysctls": {"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"}}, "user-namespaces", "fail"),
        ({"files": {"smt": "1"}}, "smt", "warn"),
        ({"files": {"ksm": "1"}}, "ksm", "warn"),
        ({"files": {"swaps": "Filename\n/swap file 1 0 -2\n"}}, "swap", "warn"),
        ({"files": {"core_pattern": "|/usr/share/apport"}}, "core-dumps", "warn"),
    ],
)
def test_what_is_wrong_has_a_fix(changes: dict[str, object], name: str, status: str) -> None:
    check = judged(**changes)[name]
    assert check.status == status
    assert check.fix
    assert (check.code in TABLE) if status == "fail" else check.code is None
    assert check.state == {"fail": "missing", "warn": "weaker"}[status]


def test_an_interceptor_is_no_condition_and_its_want_is_told() -> None:
    without, with_one = judged()["interceptor"], judged(interceptor=("3.13", "/usr/bin/python3.13"))["interceptor"]
    assert (without.status, with_one.status) == ("ok", "ok")
    assert "refused by name" in without.text
    assert without.fix
    assert "3.13" in with_one.found


def test_a_profile_lifts_apparmors_restriction() -> None:
    sysctls = {"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1"}
    assert judged(sysctls=sysctls, apparmor_profile=True)["user-namespaces"].status == "ok"


def test_this_host_can_be_read() -> None:
    assert [check.name for check in host.checks()] == [judge(GOOD).name for judge in host.CHECKS]
