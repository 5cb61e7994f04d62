"""Plants each defect of the catalogue in turn and sees that a test of its requirement fails.

    python -m tools.defects [--long] [ID-OR-REQUIREMENT...]

Writes build/defects.json and prints a table. A defect counts as found only when it was
really applied and a test marked with its requirement failed; a test that could not even
be set up proves nothing.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.defects.catalogue import DEFECTS
from tests.defects.defect import Defect

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "defects"
TEST_TIMEOUT_S = 900


@dataclass(frozen=True)
class Verdict:
    """What became of one planted defect; `found` is the only good outcome."""

    id: str
    req: str
    module: str
    outcome: str
    failed_tests: tuple[str, ...]
    duration_s: float


def make_environment(defect: Defect, folder: Path, notes: Path) -> Path:
    """A virtual environment over ours that plants the defect in each of its processes."""
    environment = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    ours = Path(sys.prefix)
    # A path file's `import` line is executed at start-up, whatever the environment says.
    (environment / "lib" / python / "site-packages" / "planted.pth").write_text(
        f"import site; site.addsitedir({str(ours / 'lib' / python / 'site-packages')!r})\n"
        f"{ROOT}\n"
        f"import tests.defects.plant as p; p.plant({defect.id!r}, {str(notes)!r})\n"
    )
    for script in ours.joinpath("bin").glob("cloche*"):
        body = script.read_text().split("\n", 1)[1]
        copy = environment / "bin" / script.name
        copy.write_text(f"#!{environment}/bin/python\n{body}")
        copy.chmod(0o755)
    return environment


def make_rootfs(defect: Defect, folder: Path) -> Path:
    """A root file system whose agent was built with the defect's cargo features."""
    agent = folder / "agent"
    features = ",".join(defect.agent_features)
    machine = os.uname().machine
    build = [f"{ROOT}/tools/build_agent.sh", "--features", features, "--out", str(agent), machine]
    subprocess.run(build, check=True)
    pack = [f"{ROOT}/tools/build_rootfs.sh", f"{agent}/cloche-guest-{machine}", f"{folder}/rootfs"]
    subprocess.run(pack, check=True)
    return folder / "rootfs" / "python.erofs"


def run_tests(defect: Defect, folder: Path, notes: Path, *, long: bool) -> None:
    """The named tests under the defect; their outcomes land in `folder`/evidence."""
    environment = make_environment(defect, folder, notes)
    variables = os.environ | defect.env
    variables["PATH"] = f"{environment}/bin:{variables['PATH']}"
    variables["VIRTUAL_ENV"] = str(environment)
    variables["CLOCHE_EVIDENCE_DIR"] = str(folder / "evidence")
    variables["CLOCHE_TEST_DEFECT"] = defect.id
    if defect.agent_features:
        variables["CLOCHE_ROOTFS"] = str(make_rootfs(defect, folder))
    argv = [str(environment / "bin" / "python"), "-m", "pytest", "-q", "--tb=short"]
    argv += ["-p", "no:cacheprovider", "--req", defect.req, *(["--long"] if long else [])]
    with (folder / "log").open("wb") as log:
        try:
            subprocess.run(
                [*argv, *defect.tests],
                check=False,
                cwd=ROOT,
                env=variables,
                stdout=log,
                stderr=log,
                timeout=TEST_TIMEOUT_S,
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


def judge(defect: Defect, folder: Path, notes: Path) -> tuple[str, list[str]]:
    """The outcome in a word, most fundamental trouble first."""
    failed, ran = failed_tests(defect, folder)
    if any(notes.glob("error-*")):
        return "stale patch", failed
    if defect.patch and not any(notes.glob("planted-*")):
        return "not planted", failed
    if not ran:
        return "no test ran", failed
    return ("found" if failed else "MISSED"), failed


def try_defect(defect: Defect, *, long: bool) -> Verdict:
    """Plant one defect, run its tests, judge."""
    started = time.monotonic()
    folder = WORK / defect.slug
    shutil.rmtree(folder, ignore_errors=True)
    notes = folder / "notes"
    notes.mkdir(parents=True)
    notes.chmod(0o1777)  # the node's processes may be another user's
    run_tests(defect, folder, notes, long=long)
    outcome, failed = judge(defect, folder, notes)
    duration_s = round(time.monotonic() - started, 1)
    return Verdict(defect.id, defect.req, defect.module, outcome, tuple(failed), duration_s)


def selected(words: list[str]) -> list[Defect]:
    """Defects by id or requirement; all without words."""
    chosen = [d for d in DEFECTS if not words or d.id in words or d.req in words]
    unknown = [word for word in words if not any(word in (d.id, d.req) for d in DEFECTS)]
    if unknown:
        raise SystemExit(f"no defect has the id or requirement {', '.join(unknown)}")
    return chosen


def show(verdicts: list[Verdict]) -> None:
    """The table a person reads."""
    table = Table("defect", "outcome", "seconds", "tests that failed", title="Planted defects")
    for verdict in verdicts:
        colour = "green" if verdict.outcome == "found" else "red"
        names = "\n".join(name.removeprefix("tests/") for name in verdict.failed_tests)
        outcome = f"[{colour}]{verdict.outcome}[/]"
        table.add_row(verdict.id, outcome, str(verdict.duration_s), names)
    Console().print(table)


def main() -> int:
    """Run the selection; 0 when every defect was found."""
    parser = argparse.ArgumentParser(description="plant defects, see tests fail")
    parser.add_argument("words", nargs="*", metavar="ID", help="defect ids or requirements")
    parser.add_argument("--long", action="store_true", help="run the tests at their full counts")
    arguments = parser.parse_args()
    verdicts = []
    for defect in selected(arguments.words):
        verdict = try_defect(defect, long=arguments.long)
        print(f"{verdict.id}: {verdict.outcome} ({verdict.duration_s} s)", flush=True)
        verdicts.append(verdict)
    if not arguments.words:
        result = ROOT / "build" / "defects.json"
        result.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    show(verdicts)
    bad = [verdict for verdict in verdicts if verdict.outcome != "found"]
    for verdict in bad:
        print(f"{verdict.id}: {verdict.outcome}; see build/defects/*/log", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
