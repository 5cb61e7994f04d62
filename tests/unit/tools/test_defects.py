"""A planted defect reaches a process that was started isolated and with no environment."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.defects import plant
from tests.defects.catalogue import DEFECTS, by_id
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


def test_an_entry_is_named_after_its_requirement() -> None:
    with pytest.raises(AssertionError, match="EXE-2/x"):
        Defect("EXE-2/x", "EXE-1", ("t",), module="m", patch=_nothing)


def test_it_is_planted_once_although_start_up_files_are_read_twice(tmp_path: Path) -> None:
    probe = "import sys; print([type(f).__name__ for f in sys.meta_path].count('_Finder'))"
    assert _outcome(tmp_path, "agent_path", probe)[0] == "1"


def test_it_follows_the_keeper_which_starts_without_start_up_files(tmp_path: Path) -> None:
    """As the keeper does, the program executes `argv[0]` again before it looks."""
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import os, sys
sys.path.insert(0, {str(defects.ROOT / "packages/cloche-server/src")!r})
if sys.argv[1] == "first":
    os.execv(sys.executable, [sys.executable, "-I", "-S", sys.argv[0], "second"])
from cloche_server.keeper import serve
print(__file__, serve.Keeper._free_slot.__qualname__)
"""
    )
    script = plant._keeper_script(by_id("ISO-4/one-uid-for-all"), tmp_path, program)
    argv = [sys.executable, "-I", "-S", script, "first"]
    ran = subprocess.run(argv, env={}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"{program} give_all_the_same_ids.")
    assert list(tmp_path.glob("planted-*"))


def test_a_test_that_fails_anyway_is_not_a_find(tmp_path: Path) -> None:
    (tmp_path / "evidence").mkdir()
    (tmp_path / "planted-1").touch()
    entry = {"reqs": ["EXE-1"], "outcome": "failed", "phase": "call"}
    (tmp_path / "evidence" / "1.json").write_text(json.dumps({"tests": {"t[1]": entry}}))
    assert defects.judge(DEFECT, tmp_path, tmp_path, {"t[1]"}) == ("found", ["t[1]"])
    assert defects.judge(DEFECT, tmp_path, tmp_path, {"t[2]"}) == ("fails anyway", [])
    (tmp_path / "log").write_text("tests/defects/walls.py:7: in patched\nE AttributeError")
    assert defects.judge(DEFECT, tmp_path, tmp_path, {"t[1]"}) == ("stale patch", [])


PURE = ("binding", "forms", "places", "redact", "strict")
"""Modules of the interceptor that need the standard library alone."""
OF_THE_INTERCEPTOR = [each for each in DEFECTS if each.module.removeprefix("interceptor.") in PURE]


@pytest.mark.parametrize("defect", OF_THE_INTERCEPTOR, ids=lambda defect: defect.id)
def test_a_patch_of_the_interceptor_stands_alone_and_fits(defect: Defect) -> None:
    """There it cannot say that it does not, and would only be missed."""
    package = Path(defects.ROOT, "packages/cloche-server/src/cloche_server/interceptor")
    probe = (
        "import importlib, pathlib, runpy\n"
        f"runpy.run_path({str(package / 'main.py')!r})['_as_package'](pathlib.Path({str(package)!r}))\n"
        f"room = {{}}\nexec({plant.standing_alone(defect)!r}, room)\n"
        f"room[{defect.patch.__name__!r}](importlib.import_module({defect.module!r}))\n"
    )
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", probe], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_the_interceptor_is_started_with_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    from cloche_server.engines.interceptor import command

    monkeypatch.setattr(command, "BOOT", command.BOOT)
    plant._follow_into_interceptor(by_id("SEC-3/echoed"), command)
    compile(command.BOOT, "boot", "exec")
    assert "redact_nothing" in command.BOOT
    assert plant.INTERCEPTOR_RUN not in command.BOOT
