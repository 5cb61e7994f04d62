"""`cloche doctor`: what it reads is true, what it does not like has a fix, and what it packs is nobody's secret."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

import cloche_engine
from tests.promises.chroots import IS_CGROUP_V2
from tests.promises.clean_machines import CleanMachine
from tests.promises.nodes import CLI, RealNode

SECRETS = ("s3kr3t-of-the-shell", "s3kr3t-of-a-command", "s3kr3t-that-was-printed", "s3kr3t-key")


def doctor(*options: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(CLI), "doctor", *options], capture_output=True, check=False, timeout=60)


@pytest.fixture(scope="module")
def checks() -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(doctor("--json").stdout)["checks"]}


@pytest.mark.req("UX-6")
def test_every_check_has_a_verdict_and_every_bad_one_a_fix(checks: dict[str, dict[str, Any]]) -> None:
    named = {
        "kernel",
        "architecture",
        "engine",
        "platform",
        "cgroup",
        "subuids",
        "user-namespaces",
        "smt",
        "ksm",
        "swap",
    }
    assert named <= set(checks)
    for check in checks.values():
        assert check["state"] in ("ok", "weaker", "missing")
        assert check["text"]
        assert (check["state"] == "ok") == (not check["fix"]), check
        assert (check["state"] == "missing") == bool(check["code"]), check


@pytest.mark.req("UX-6")
def test_a_person_reads_the_same(checks: dict[str, dict[str, Any]]) -> None:
    shown = doctor().stdout.decode()
    for check in checks.values():
        assert re.search(rf"^[✓!✗+x] {check['name']} ", shown, re.MULTILINE), check["name"]
        assert check["text"][:150] in shown
        assert not check["fix"] or check["fix"] in shown


@pytest.mark.req("UX-8")
def test_strict_fails_where_something_is_weaker_than_production(checks: dict[str, dict[str, Any]]) -> None:
    states = {check["state"] for check in checks.values()}
    assert doctor().returncode == (1 if "missing" in states else 0)
    assert doctor("--strict").returncode == (1 if states - {"ok"} else 0)
    for name, is_weaker in {
        "cgroup": not IS_CGROUP_V2,
        "swap": len(Path("/proc/swaps").read_text().splitlines()) > 1,
        "smt": _is_one("/sys/devices/system/cpu/smt/active"),
        "ksm": _is_one("/sys/kernel/mm/ksm/run"),
    }.items():
        assert (checks[name]["state"] == "weaker") == is_weaker, f"{name} on this host"


def _is_one(path: str) -> bool:
    return Path(path).exists() and Path(path).read_text().strip() == "1"


@pytest.mark.req("ISO-5")
def test_the_digest_is_that_of_what_is_executed(checks: dict[str, dict[str, Any]], node: RealNode) -> None:
    with open(cloche_engine.runsc_path(), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert checks["engine"]["text"].endswith(f"sha256 {digest}")
    release = re.search(r"runsc release-(\d{8})\.\d+ \(floor release-(\d{8})\)", checks["engine"]["text"])
    assert release
    assert int(release[1]) >= int(release[2])
    with node.sandbox() as box:
        report = box.view.isolation
        assert report is not None
        assert (report.digest, report.version) == (digest, release[0].split()[1])
        assert report.host_uid is not None
        running = {_executed(pid) for pid in _processes_of(report.host_uid)}
    assert digest in running, "the process that runs the sandbox is that very file"


def _processes_of(uid: int) -> list[Path]:
    return [path for path in Path("/proc").iterdir() if path.name.isdigit() and _uid(path) == uid]


def _uid(path: Path) -> int | None:
    try:
        return path.stat().st_uid if int(path.name) > 1 else None
    except FileNotFoundError:
        return None


def _executed(path: Path) -> str:
    try:
        with open(path / "exe", "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:  # it ended, or is a stub without a file
        return ""


@pytest.mark.req("UX-6")
@pytest.mark.timeout(240)
@pytest.mark.skipif(IS_CGROUP_V2, reason="version 2 is delegated by systemd, which this chroot has not")
def test_the_bundle_has_facts_and_no_secrets(clean_machine: CleanMachine) -> None:
    clean_machine.does("/home/alice/env/bin/cloche delegate alice")
    try:
        shell, command, printed, key = SECRETS
        before = f"export TOKEN={shell} CLOCHE_API_KEY={key}"
        inside = f"cloche run -e TOKEN={command} -- sh -c 'echo {printed}'"
        code, text = clean_machine.alice(f"{before}; {inside}")
        assert (code, text.splitlines()[-1]) == (0, printed), text
        code, text = clean_machine.alice(f"{before}; cloche doctor --bundle facts.tar.gz")
        assert (code, "look into it before you send it" in text) == (0, True), text
        bundle = clean_machine.tree / "home/alice/facts.tar.gz"
        assert bundle.stat().st_mode & 0o077 == 0, "nobody else reads it"
        parts = _parts(bundle.read_bytes())
        names = {"checks.json", "version.txt", "node.json", "log/daemon.log", "log/keeper.log"}
        assert set(parts) == {f"cloche-doctor/{name}" for name in names}
        for name, data in parts.items():
            for secret in SECRETS:
                assert secret.encode() not in data, f"{secret} is in {name}"
        facts = {check["name"]: check["state"] for check in json.loads(parts["cloche-doctor/checks.json"])}
        assert facts["cgroup"] == "weaker"
        assert json.loads(parts["cloche-doctor/node.json"])["mode"] == "user"
    finally:
        clean_machine.alice("rm -f facts.tar.gz; cloche reset --all --yes")
        clean_machine.does("/home/alice/env/bin/cloche delegate --remove alice")


def _parts(data: bytes) -> dict[str, bytes]:
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for entry in tar:
            file = tar.extractfile(entry)
            assert file is not None, entry.name
            found[entry.name] = file.read()
    return found
