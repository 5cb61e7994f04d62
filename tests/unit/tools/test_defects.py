"""A planted defect reaches a process that was started isolated and with no environment."""

import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.defects import plant
from tests.defects.defect import Defect
from tools import defects

# A catalogue of one entry, as a module that the planted process can import.
SAMPLE = """
from tests.defects import plant
from tests.defects.defect import Defect, replace

def patch(module):
    replace(module, {attribute!r}, lambda _: None)

DEFECT = Defect("EXE-1/x", "EXE-1", ("t",), module="cloche_engine.binaries", patch=patch)
plant.by_id = lambda _: DEFECT
"""


def _nothing(module: ModuleType) -> None:
    pass


DEFECT = Defect("EXE-1/x", "EXE-1", ("t",), module="cloche_engine.binaries", patch=_nothing)


def _outcome(tmp_path: Path, attribute: str, probe: str) -> tuple[str, str]:
    """Plant as tools/defects.py does; what the process printed, and the verdict."""
    notes = tmp_path / "notes"
    notes.mkdir()
    environment = defects.make_environment(DEFECT, tmp_path, notes)
    (path_file,) = environment.glob("lib/*/site-packages/planted.pth")
    path_file.with_name("planted_sample.py").write_text(SAMPLE.format(attribute=attribute))
    lines = path_file.read_text().splitlines()
    path_file.write_text("\n".join([*lines[:-1], "import planted_sample", lines[-1]]))
    python = environment / "bin" / "python"
    argv = [python, "-I", "-c", probe]
    ran = subprocess.run(argv, env={}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    return ran.stdout.strip(), defects.judge(DEFECT, tmp_path, notes)[0]


def test_it_is_planted_after_import(tmp_path: Path) -> None:
    probe = "import cloche_engine.binaries as b; print(b.agent_path, b.__spec__.loader)"
    said, outcome = _outcome(tmp_path, "agent_path", probe)
    assert said.startswith("None ")
    assert "SourceFileLoader" in said, "the real loader is left behind"
    assert outcome == "no test ran"


def test_a_patch_that_no_longer_fits_is_not_a_find(tmp_path: Path) -> None:
    _, outcome = _outcome(tmp_path, "a_name_that_was_renamed", "import cloche_engine")
    assert outcome == "stale patch"


def test_a_module_that_nobody_imports_is_not_a_find(tmp_path: Path) -> None:
    _, outcome = _outcome(tmp_path, "agent_path", "print(1)")
    assert outcome == "not planted"


def test_this_process_is_not_planted() -> None:
    import cloche_engine.binaries

    assert callable(cloche_engine.binaries.agent_path)
    assert plant.by_id.__module__ == "tests.defects.catalogue"


def test_an_entry_that_changes_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="changes nothing"):
        Defect("EXE-1/x", "EXE-1", ("t",))
