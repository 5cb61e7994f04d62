"""The thinnest true line: from what a user types to a process under a kernel of its own, and back."""

import json

import pytest

from tests.promises.nodes import RealNode


@pytest.mark.req("UX-1")
@pytest.mark.req("FLT-1")
def test_one_command_prints_42(node: RealNode) -> None:
    done = node.cloche("run", "--", "python3", "-c", "print(6*7)")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"42\n", b"")


@pytest.mark.req("ISO-1")
def test_the_kernel_inside_is_not_the_hosts(node: RealNode) -> None:
    with node.sandbox() as box:
        inside = box.run(["python3", "-c", "import os; print(os.uname().release)"]).stdout.strip()
        assert inside.endswith("-gvisor"), inside
        report = box.info().isolation
        assert report is not None
        assert (report.isolation_class, report.engine) == ("gvisor", "gvisor")
        assert report.weaker == []


@pytest.mark.req("UX-2")
def test_the_sdk_runs_a_command(node: RealNode) -> None:
    with node.sandbox(ttl_s=60) as box:
        result = box.run("echo out; echo err >&2; exit 3")
        seen = (result.stdout, result.stderr, result.exit_code, str(result.ended))
        assert seen == ("out\n", "err\n", 3, "exited")


@pytest.mark.req("LIF-1")
def test_ps_shows_it_until_it_is_over(node: RealNode) -> None:
    with node.sandbox(name="shown") as box:
        listed = json.loads(node.cloche("ps", "--json").stdout)
        assert [entry["name"] for entry in listed["sandboxes"] if entry["id"] == box.id] == ["shown"]
    listed = json.loads(node.cloche("ps", "--json").stdout)
    assert box.id not in [entry["id"] for entry in listed["sandboxes"]]
