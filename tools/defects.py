"""Plants each defect of the catalogue in turn and sees that a test of its requirement fails.

    python -m tools.defects [--long] [--jobs N] [ID-OR-REQUIREMENT...]

Writes build/defects.json and prints a table. A defect counts as found only when it was
really applied, and a test marked with its requirement failed under it that passes without;
a test that could not even be set up proves nothing.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.defects.catalogue import DEFECTS
from tests.defects.defect import Defect
from tools import evidence

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "defects"
RUN_S_MAX = 180
TEST_S_MAX = 60
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
# The others take longer to load than most of these tests to run.
PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "no:cacheprovider")


@dataclass(frozen=True)
class Verdict:
    """What became of one planted defect; `found` is the only good outcome."""

    id: str
    req: str
    module: str
    outcome: str
    tests: tuple[str, ...]
    """Those that failed under it and pass without; where there are none, those that should have."""
    duration_s: float


def make_environment(defect: Defect, folder: Path, notes: Path) -> Path:
    """A virtual environment over ours that plants the defect in each of its processes."""
    environment = folder / "venv"
    packages = environment / "lib" / PYTHON / "site-packages"
    packages.mkdir(parents=True)
    (environment / "bin").mkdir()
    for name in ("python", "python3", PYTHON):
        (environment / "bin" / name).symlink_to(Path(sys.executable).resolve())
    home = Path(sys.executable).resolve().parent
    (environment / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
    ours = Path(sys.prefix)
    # A path file's `import` line is executed at start-up, whatever the environment says.
    (packages / "planted.pth").write_text(
        f"import site; site.addsitedir({str(ours / 'lib' / PYTHON / 'site-packages')!r})\n"
        f"{ROOT}\n"
        f"import tests.defects.plant as p; p.plant({defect.id!r}, {str(notes)!r})\n"
    )
    for script in ours.joinpath("bin").glob("cloche*"):
        body = script.read_text().split("\n", 1)[1]
        copy = environment / "bin" / script.name
        copy.write_text(f"#!{environment}/bin/python\n{body}")
        copy.chmod(0o755)
    return environment


def run_tests(defect: Defect, folder: Path, notes: Path, *, long: bool) -> None:
    """The named tests under the defect, up to the first that fails; their outcomes land in `folder`/evidence."""
    environment = make_environment(defect, folder, notes)
    variables = dict(os.environ)
    variables["PATH"] = f"{environment}/bin:{variables['PATH']}"
    variables["VIRTUAL_ENV"] = str(environment)
    variables["CLOCHE_EVIDENCE_DIR"] = str(folder / "evidence")
    variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    argv = [str(environment / "bin" / "python"), "-m", "pytest", "-q", "-x", "--tb=short"]
    argv += [part for plugin in PLUGINS for part in ("-p", plugin)]
    argv += ["--req", defect.req, *(["--long"] if long else [f"--timeout={TEST_S_MAX}"])]
    with (folder / "log").open("wb") as log:
        try:
            subprocess.run(
                [*argv, *defect.tests],
                check=False,
                cwd=ROOT,
                env=variables,
                stdout=log,
                stderr=log,
                timeout=None if long else RUN_S_MAX,
            )
        except subprocess.TimeoutExpired:
            log.write(b"\nstopped: the tests took too long under this defect\n")


def failed_tests(defect: Defect, folder: Path) -> tuple[list[str], bool]:
    """Tests of the requirement that ran and failed; and whether any of them ran at all."""
    failed: list[str] = []
    ran = False
    for record in folder.glob("evidence/*.json"):
        for name, entry in json.loads(record.read_text())["tests"].items():
            if defect.req in entry["reqs"] and entry["phase"] != "setup":
                ran = True
                if entry["outcome"] == "failed":
                    failed.append(name)
    return failed, ran


def judge(defect: Defect, folder: Path, notes: Path, passing: set[str] | None = None) -> tuple[str, list[str]]:
    """The outcome in a word, most fundamental trouble first. `passing`: the tests that pass without a defect."""
    failed, ran = failed_tests(defect, folder)
    if any(notes.glob("error-*")) or _shows_a_patch(folder / "log"):
        return "stale patch", []
    if not any(notes.glob("planted-*")):
        return "not planted", []
    if not ran:
        return "no test ran", []
    if not failed:
        return "MISSED", []
    because = [name for name in failed if passing is None or name in passing]
    return ("found" if because else "fails anyway"), because


def _shows_a_patch(log: Path) -> bool:
    """Whether an error came out of a patch itself, in a test or in a process whose log was shown."""
    return log.is_file() and bool(re.search(r"tests/defects/\w+\.py", log.read_text(errors="replace")))


def try_defect(defect: Defect, passing: set[str], *, long: bool) -> Verdict:
    """Plant one defect, run its tests, judge."""
    started = time.monotonic()
    folder = WORK / defect.slug
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # The node's processes may be another user's, and see no more of this checkout than they need.
    notes = Path(tempfile.mkdtemp(prefix="cloche-defect-"))
    notes.chmod(0o1777)
    try:
        run_tests(defect, folder, notes, long=long)
        outcome, because = judge(defect, folder, notes, passing)
        shutil.copytree(notes, folder / "notes")
    finally:
        shutil.rmtree(notes, ignore_errors=True)
    duration_s = round(time.monotonic() - started, 1)
    return Verdict(defect.id, defect.req, defect.module, outcome, tuple(because) or defect.tests, duration_s)


def is_of(test: str, named: str) -> bool:
    """Whether a test that ran is (a case of) the one that a defect names."""
    return test == named or test.startswith((f"{named}[", f"{named}::"))


def passing_without(defects: list[Defect]) -> set[str]:
    """Tests that passed when they last ran without a defect; those that never did are run now."""
    named = sorted({test for defect in defects for test in defect.tests})
    known = _outcomes()
    if missing := [test for test in named if not any(is_of(ran, test) for ran in known)]:
        print(f"without a defect first, for they never ran: {len(missing)} tests", flush=True)
        with (WORK / "without.log").open("wb") as log:
            argv = [sys.executable, "-m", "pytest", "-q", *missing]
            subprocess.run(argv, check=False, cwd=ROOT, stdout=log, stderr=log)
        known = _outcomes()
    return {test for test, outcome in known.items() if outcome == "passed"}


def _outcomes() -> dict[str, str]:
    return {test: outcome for tests in evidence.latest_outcomes().values() for test, outcome in tests.items()}


def selected(words: list[str]) -> list[Defect]:
    """Defects by id or requirement; all without words."""
    chosen = [d for d in DEFECTS if not words or d.id in words or d.req in words]
    unknown = [word for word in words if not any(word in (d.id, d.req) for d in DEFECTS)]
    if unknown:
        raise SystemExit(f"no defect has the id or requirement {', '.join(unknown)}")
    return chosen


def show(verdicts: list[Verdict], seconds: float) -> None:
    """The table a person reads."""
    columns = ("defect", "requirement", "test", "failed as it should", "s")
    table = Table(*columns, title=f"Planted defects ({seconds:.0f} s)")
    for verdict in verdicts:
        names = "\n".join(name.removeprefix("tests/") for name in verdict.tests)
        answer = "[green]yes[/]" if verdict.outcome == "found" else f"[red]no: {verdict.outcome}[/]"
        name = verdict.id.partition("/")[2]
        table.add_row(name, verdict.req, names.replace("[", r"\["), answer, f"{verdict.duration_s:.0f}")
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def main() -> int:
    """Run the selection; 0 when every defect was found."""
    parser = argparse.ArgumentParser(description="plant defects, see tests fail")
    parser.add_argument("words", nargs="*", metavar="ID", help="defect ids or requirements")
    parser.add_argument("--long", action="store_true", help="run the tests at their full counts")
    parser.add_argument("--jobs", type=int, default=3, help="how many at once (%(default)s)")
    arguments = parser.parse_args()
    started = time.monotonic()
    chosen = selected(arguments.words)
    if not arguments.words:
        shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    passing = passing_without(chosen)

    def one(defect: Defect) -> Verdict:
        verdict = try_defect(defect, passing, long=arguments.long)
        print(f"{verdict.id}: {verdict.outcome} ({verdict.duration_s} s)", flush=True)
        return verdict

    with ThreadPoolExecutor(arguments.jobs) as workers:
        verdicts = list(workers.map(one, chosen))
    write(verdicts)
    show(verdicts, time.monotonic() - started)
    bad = [verdict for verdict in verdicts if verdict.outcome != "found"]
    for verdict in bad:
        print(f"{verdict.id}: {verdict.outcome}; see build/defects/*/log", file=sys.stderr)
    return 1 if bad else 0


def write(verdicts: list[Verdict]) -> None:
    """What is known of every defect: of those that ran now, and of the others from before."""
    path = ROOT / "build" / "defects.json"
    before = {row["id"]: row for row in json.loads(path.read_text())} if path.is_file() else {}
    now = {verdict.id: asdict(verdict) for verdict in verdicts}
    known = before | now
    path.write_text(json.dumps([known[defect.id] for defect in DEFECTS if defect.id in known], indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
