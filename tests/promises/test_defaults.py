"""One table of defaults, each value read where it acts; an opposite for all that leaves state; and nothing weaker by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from cloche.cli.main import VERBS, cli
from cloche.wire.errors import ClocheError
from tests.promises.chroots import IS_CGROUP_V2
from tests.promises.clean_machines import CALL, CleanMachine
from tests.promises.nodes import RealNode

MIB = 1024 * 1024
DAY_S = 24 * 3600

# ------------------------------------------------------------------ the table, as promised


@pytest.fixture(scope="module")
def plain(node: RealNode) -> Iterator[dict[str, Any]]:
    """The view of a sandbox for which nothing was asked."""
    made = node.cloche("create", "--json")
    assert made.returncode == 0, made.stderr
    view = json.loads(made.stdout)
    yield view
    assert node.cloche("kill", view["id"]).returncode == 0


def limit_files(memory_cgroup: str) -> dict[str, str]:
    """What the kernel was told, by the names of version 1."""
    path = Path(memory_cgroup)
    if IS_CGROUP_V2:
        quota, period = (path / "cpu.max").read_text().split()
        return {
            "memory": (path / "memory.max").read_text().strip(),
            "swap": (path / "memory.swap.max").read_text().strip(),
            "cpus": str(int(quota) / int(period)),
        }
    cpu = Path(memory_cgroup.replace("/memory/", "/cpu/", 1))
    both = path / "memory.memsw.limit_in_bytes"
    memory = int((path / "memory.limit_in_bytes").read_text())
    quota_us, period_us = (int((cpu / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    swap = int(both.read_text()) - memory if both.exists() else 0
    return {"memory": str(memory), "swap": str(swap), "cpus": str(quota_us / period_us)}


@pytest.mark.req("UX-7")
def test_the_view_and_the_kernel_say_the_same(plain: dict[str, Any]) -> None:
    wanted = {"cpus": 1.0, "memory_bytes": 512 * MIB, "processes": 256, "disk_bytes": 2048 * MIB, "open_files": 4096}
    assert plain["limits"] == wanted
    assert limit_files(plain["isolation"]["cgroup"]) == {"memory": str(512 * MIB), "swap": "0", "cpus": "1.0"}
    assert plain["isolation"]["weaker"] == []
    assert plain["privileges"] == "none"
    assert 15 * 60 - 30 < plain["ends_in_s"] <= 15 * 60
    assert plain["idle_timeout_s"] is None


@pytest.mark.req("UX-7")
def test_the_guest_meets_them(node: RealNode, plain: dict[str, Any]) -> None:
    script = """
import json, os, resource, socket
disk = os.statvfs("/workspace")
with open("/proc/meminfo") as file: memory = dict(line.split()[:2] for line in file)
try: socket.create_connection(("192.0.2.1", 80), 2); out = "connected"
except OSError as error: out = error.strerror
print(json.dumps({
    "processes": resource.getrlimit(resource.RLIMIT_NPROC), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "disk": disk.f_blocks * disk.f_frsize, "memory_kb": int(memory["MemTotal:"]), "swap_kb": memory.get("SwapTotal:", "0"),
    "interfaces": [name for _number, name in socket.if_nameindex()], "out": out, "uid": os.getuid(),
}))
"""
    done = node.cloche("exec", plain["id"], "--", "python3", "-c", script)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "processes": [256, 256],
        "files": [4096, 4096],
        "disk": 2048 * MIB,
        "memory_kb": 512 * 1024,
        "swap_kb": "0",
        "interfaces": ["lo"],
        "out": "Network is unreachable",
        "uid": 1000,
    }


@pytest.mark.req("UX-7")
def test_times_and_output(node: RealNode) -> None:
    kept = node.cloche("run", "--keep", "--", "true")
    (name,) = re.findall(r"cloche kill (\S+)", kept.stderr.decode())
    with node.client() as client, node.sandbox() as ours:
        ran = client.connect(name)
        assert ours.view.ends_in_s is not None
        assert 15 * 60 - 30 < ours.view.ends_in_s <= 15 * 60, "of the SDK"
        (command,) = ran.commands.list()
        assert command.view.timeout_s == 5 * 60, "of `cloche run`"
        record = json.loads((node.paths.state / "sandboxes" / ran.id / "record.json").read_text())
        assert record["retain_s"] == DAY_S
        with pytest.raises(ClocheError) as refused:
            ours.extend(DAY_S + 1)
        assert refused.value.code == "invalid_request"
        ours.extend(DAY_S)
        ends_in_s = ours.info().ends_in_s
        assert ends_in_s is not None
        assert DAY_S - 60 < ends_in_s <= DAY_S
        flood = ours.commands.start(["head", "-c", str(65 * MIB), "/dev/zero"])
        flood.wait()
        flood_view = flood.info()
        assert flood_view.ended is not None
        assert flood_view.ended.reason.value == "output_limit"
        assert flood_view.output.end == 64 * MIB
        ran.kill()
    too_long = node.cloche("create", "--ttl", "25h")
    assert (too_long.returncode, b"ttl_s" in too_long.stderr) == (2, True)


# ------------------------------------------------------------------ opposites

OPPOSITES = {
    "up": "cloche down",
    "create": "cloche kill",
    "run": "cloche kill",
    "shell": "cloche kill",
    "image pull": "cloche image rm",
    "image build": "cloche image rm",
    "image import": "cloche image rm",
    "egress allow": "cloche egress revoke",
    "secret set": "cloche secret rm",
    "delegate": "--remove",
    "down": "cloche up",
}
"""Verbs that leave something behind, and what takes it away; each one's --help says so."""
LEAVE_NOTHING = {"exec", "ps", "top", "logs", "port", "df", "doctor", "node logs", "node show", "version", "completion"}
LEAVE_NOTHING |= {"image ls", "image inspect", "image export", "egress show", "egress grants", "policy explain"}
LEAVE_NOTHING |= {"secret ls", "approvals ls", "approvals watch", "approvals approve", "approvals deny"}
TAKE_AWAY = {"kill", "prune", "reset", "image rm", "image gc", "image fsck", "egress revoke", "secret rm"}
INTO_WHAT_IS_THERE = {"cp"}


def verbs_of(verb: str) -> list[str]:
    """A group's are its own verbs."""
    context = click.Context(cli)
    found = cli.get_command(context, verb)
    return [f"{verb} {name}" for name in found.list_commands(context)] if isinstance(found, click.Group) else [verb]


@pytest.mark.req("UX-7")
def test_what_leaves_state_names_its_opposite(node: RealNode) -> None:
    verbs = {name for verb in VERBS for name in verbs_of(verb)}
    assert verbs == {*OPPOSITES, *LEAVE_NOTHING, *TAKE_AWAY, *INTO_WHAT_IS_THERE}, "a new verb: put it here"
    for verb, opposite in OPPOSITES.items():
        text = " ".join(node.cloche(*verb.split(), "--help").stdout.decode().split())
        assert opposite in text, f"cloche {verb} --help does not name {opposite}"


@pytest.mark.req("UX-7")
def test_kill_takes_away_what_create_and_run_keep_left(node: RealNode) -> None:
    created = node.cloche("create", "--name", "one").stdout.decode().strip()
    (kept,) = re.findall(r"cloche kill (\S+)", node.cloche("run", "--keep", "--", "true").stderr.decode())
    there = node.cloche("ps", "--quiet").stdout.decode().split()
    assert {created, kept} <= set(there)
    assert node.cloche("kill", created, kept).returncode == 0
    assert not {created, kept} & set(node.cloche("ps", "--quiet").stdout.decode().split())
    assert node.cloche("prune", "--yes").returncode == 0
    left = node.cloche("ps", "--all", "--quiet").stdout.decode().split()
    assert not {created, kept} & set(left)


# ------------------------------------------------------------------ nothing weaker by itself

BIN = "/home/alice/env/lib/python3*/site-packages/cloche_engine/bin"
OLD = "printf '#!/bin/sh\\necho runsc version release-20240729.0\\n'"
MISSING = {
    "no_newuidmap": ("mv /usr/bin/newuidmap /root/", "mv /root/newuidmap /usr/bin/", "sudo apt-get install uidmap"),
    "no_subuids": ("mv /etc/subuid /root/", "mv /root/subuid /etc/", "sudo usermod --add-subuids"),
    "engine_too_old": (
        f"cd {BIN} && mv runsc /root/ && {OLD} >runsc && chmod 755 runsc",
        f"cd {BIN} && mv /root/runsc .",
        "uv tool upgrade cloche",
    ),
    "engine_missing": (f"cd {BIN} && mv runsc /root/", f"cd {BIN} && mv /root/runsc .", "cloche[server]"),
    "no_cgroup_delegation": (
        "/home/alice/env/bin/cloche delegate --remove alice",
        "/home/alice/env/bin/cloche delegate alice",
        "delegate alice",
    ),
}
"""What is taken away (as root), given back, and a part of the advice."""


@pytest.fixture(scope="module")
def delegated(clean_machine: CleanMachine) -> Iterator[CleanMachine]:
    """Everything is there for alice's own node; each test takes one thing away."""
    if IS_CGROUP_V2:
        pytest.skip("version 2 is delegated by systemd, which this chroot has not")
    clean_machine.does("/home/alice/env/bin/cloche delegate alice")
    try:
        yield clean_machine
    finally:
        clean_machine.alice("cloche reset --all --yes")
        clean_machine.does("/home/alice/env/bin/cloche delegate --remove alice")


@pytest.mark.req("UX-6")
@pytest.mark.req("UX-8")
@pytest.mark.req("ISO-5")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("code", MISSING)
def test_what_is_missing_is_an_error_with_its_fix(delegated: CleanMachine, code: str) -> None:
    take, give_back, advice = MISSING[code]
    delegated.does(take)
    try:
        exit_code, text = delegated.alice(f"cloche run -- {CALL}")
        assert (exit_code, text.startswith(f"✗ {code}: ")) == (125, True), text
        assert advice in text, text
        assert "42" not in text.replace("2042", ""), "it ran nevertheless"
        assert delegated.processes() == [], "a refused node leaves no process"
        doctor = delegated.piped("alice", "env/bin/cloche doctor --json")
        assert doctor.returncode == 1
        (found,) = [check for check in json.loads(doctor.stdout)["checks"] if check["code"] == code]
        assert found["state"] == "missing"
        assert advice in found["fix"]
    finally:
        delegated.does(give_back)


@pytest.mark.req("UX-8")
@pytest.mark.timeout(240)
def test_only_a_name_goes_past_it_and_every_sandbox_shows_it(delegated: CleanMachine) -> None:
    delegated.does("/home/alice/env/bin/cloche delegate --remove alice")
    try:
        exit_code, text = delegated.alice("cloche up --accept single-uid")
        assert (exit_code, text.startswith("✗ unsupported: ")) == (125, True), text
        exit_code, text = delegated.alice("cloche up --accept no-cgroup")
        assert (exit_code, "no limits by cgroup; accepted: no-cgroup" in text) == (0, True), text
        made = delegated.piped("alice", "env/bin/cloche create --json")
        assert json.loads(made.stdout)["isolation"]["weaker"] == ["no-cgroup"], made.stderr
    finally:
        delegated.alice("cloche down --yes")
        delegated.does("/home/alice/env/bin/cloche delegate alice")
    assert delegated.alice(f"cloche run -- {CALL}")[1].splitlines()[-1] == "42", "with everything there again"
    assert delegated.alice("cloche down --yes")[0] == 0
