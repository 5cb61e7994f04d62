"""Renders what has been proved -> build/evidence.json and docs/controls.md.

Inputs: docs/requirements.md (the promises), the marks on the tests, build/evidence/*.json
(how they ended, latest run of each test), build/defects.json (planted defects), the
catalogue, and the sources (a module that names a requirement's id implements it).

A requirement is *proved* when its tests passed and, for the families whose controls can
be switched off, a planted defect was found by one of them. Everything else is said plainly.
But for the status, controls.md is made of the checkout alone: a test compares the two.
"""

import ast
import json
import re
import subprocess
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.defects.catalogue import DEFECTS

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "docs" / "requirements.md"
CONTROLS = ROOT / "docs" / "controls.md"
EVIDENCE = ROOT / "build" / "evidence.json"

# Families in which each requirement is a control that can be switched off.
NEEDS_DEFECT = ("ISO", "EXE", "LIF", "FS", "RES", "IMG", "NET", "SEC", "POL")
_ROW = re.compile(r"^\| ([A-Z]+-\d+) \| (now|later) \| (.+?) \| (.*?) ?\|$", re.MULTILINE)
_SOURCES = ("packages/*/src/**/*.py", "guest-agent/**/*.rs", "converter/src/**/*.rs")

_HEAD = """\
# Controls

Rendered by `just evidence` from the marks on the tests; do not edit. *proved*: its tests
passed in the last run and, where a control can be switched off, a planted defect was found
by one of them. *unproved*: one of these is missing, and the column says which. *later*: not
part of this release. The promises in full: [requirements.md](requirements.md).

| Id | Promise | Status | Code | Tests | Planted defects | Answers |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Requirement:
    """One row of docs/requirements.md."""

    id: str
    when: str
    sentence: str
    answers: str


@dataclass(frozen=True)
class Control:
    """A requirement with everything that speaks for it."""

    id: str
    sentence: str
    answers: str
    status: str
    code: list[str]
    marked: list[str]
    """Test functions, by their marks."""
    tests: dict[str, str]
    """How each of their cases ended."""
    defects: dict[str, str]


def requirements() -> list[Requirement]:
    """All promises, in the order of the document."""
    return [Requirement(*row) for row in _ROW.findall(REQUIREMENTS.read_text())]


@cache
def marked_tests() -> dict[str, dict[str, bool]]:
    """Requirement -> test function -> whether it runs at CI's size."""
    found: dict[str, dict[str, bool]] = defaultdict(dict)
    for path in sorted((ROOT / "tests").glob("*/**/test_*.py")):
        module = ast.parse(path.read_text())
        everywhere = [
            mark
            for statement in module.body
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark"
            for mark in _marks(statement.value)
        ]
        for function in ast.walk(module):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name.startswith("test_"):
                own = [*everywhere, *(mark for decorator in function.decorator_list for mark in _marks(decorator))]
                for req in (mark for mark in own if mark != "long"):
                    found[req][f"{path.relative_to(ROOT)}::{function.name}"] = "long" not in own
    return found


def _marks(node: ast.expr) -> list[str]:
    """The requirements of a mark or of a list of them, and `long`."""
    if isinstance(node, ast.List | ast.Tuple):
        return [mark for element in node.elts for mark in _marks(element)]
    if ast.unparse(node) == "pytest.mark.long":
        return ["long"]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.req":
        return [str(ast.literal_eval(node.args[0]))]
    return []


def latest_outcomes() -> dict[str, dict[str, str]]:
    """Requirement -> test -> outcome in the newest run that had the test."""
    records = [json.loads(path.read_text()) for path in (ROOT / "build/evidence").glob("*.json")]
    newest: dict[str, Any] = {}
    for record in sorted(records, key=lambda record: float(record["started"])):
        newest.update(record["tests"])
    outcomes: dict[str, dict[str, str]] = defaultdict(dict)
    for test, entry in sorted(newest.items()):
        for req in entry["reqs"]:
            if function_of(test) in marked_tests()[req]:  # else it is a record of a test that is gone
                outcomes[req][test] = entry["outcome"]
    return outcomes


def defect_outcomes() -> dict[str, dict[str, str]]:
    """Requirement -> defect -> outcome; `not run` for what the last run did not have."""
    path = ROOT / "build" / "defects.json"
    ran = {v["id"]: v["outcome"] for v in json.loads(path.read_text())} if path.is_file() else {}
    outcomes: dict[str, dict[str, str]] = defaultdict(dict)
    for defect in DEFECTS:
        outcomes[defect.req][defect.id] = ran.get(defect.id, "not run")
    return outcomes


def code_by_requirement() -> dict[str, set[str]]:
    """Modules that name a requirement, and modules in which a defect switches one off."""
    found: dict[str, set[str]] = defaultdict(set)
    tracked = [path for pattern in _SOURCES for path in ROOT.glob(pattern)]
    for path in tracked:
        if "/target/" in str(path):
            continue
        for req in re.findall(r"\b[A-Z]{2,3}-\d+\b", path.read_text(errors="replace")):
            found[req].add(str(path.relative_to(ROOT)))
    for defect in DEFECTS:
        for source in ROOT.glob(f"packages/*/src/{defect.module.replace('.', '/')}.py"):
            found[defect.req].add(str(source.relative_to(ROOT)))
    return found


def function_of(test: str) -> str:
    """The test without its case."""
    return test.partition("[")[0]


def function_outcomes(tests: dict[str, str]) -> dict[str, str]:
    """A function failed with any of its cases, and passed with one if none failed; a skipped case proves nothing."""
    order = ("failed", "passed", "skipped")
    found: dict[str, str] = {}
    for test, outcome in tests.items():
        name = function_of(test)
        found[name] = min(outcome, found.get(name, outcome), key=order.index)
    return found


def status_of(req: Requirement, marked: dict[str, bool], tests: dict[str, str], defects: dict[str, str]) -> str:
    """One word, and for `unproved` the reason."""
    if req.when == "later":
        return "later"
    if not marked:
        return "unproved (no test)"
    ended = function_outcomes(tests)
    for wanted in ("failed", "skipped"):
        if bad := sum(outcome == wanted for outcome in ended.values()):
            return f"unproved ({bad} of {len(marked)} tests {wanted})"
    if missing := sum(in_ci and name not in ended for name, in_ci in marked.items()):
        return f"unproved ({missing} of {len(marked)} tests not run)"
    if req.id.startswith(NEEDS_DEFECT):
        if not defects:
            return "unproved (no planted defect)"
        missed = [name for name, outcome in defects.items() if outcome != "found"]
        if missed:
            return f"unproved (defect {missed[0].partition('/')[2]}: {defects[missed[0]]})"
    return "proved"


def collect() -> list[Control]:
    """Every requirement with its evidence."""
    tests, defects, code = latest_outcomes(), defect_outcomes(), code_by_requirement()
    marked = marked_tests()
    return [
        Control(
            id=req.id,
            sentence=req.sentence,
            answers=req.answers,
            status=status_of(req, marked.get(req.id, {}), tests.get(req.id, {}), defects.get(req.id, {})),
            code=sorted(code.get(req.id, ())),
            marked=list(marked.get(req.id, {})),
            tests=tests.get(req.id, {}),
            defects=defects.get(req.id, {}),
        )
        for req in requirements()
    ]


def _cell(lines: list[str]) -> str:
    return "<br>".join(f"`{line}`" for line in dict.fromkeys(lines))


def row(control: Control) -> str:
    """One line of docs/controls.md."""
    code = [re.sub(r"^packages/[^/]+/src/", "", path) for path in control.code]
    tests = [test.removeprefix("tests/") for test in control.marked]
    cells = [control.id, control.sentence, control.status, _cell(code), _cell(tests)]
    cells += [_cell(list(control.defects)), control.answers]
    return "| " + " | ".join(cells) + " |\n"


def render(controls: list[Control]) -> str:
    """The whole page."""
    return _HEAD + "".join(row(control) for control in controls)


def without_status(page: str) -> list[str]:
    """What of the page does not come from a run."""
    return [re.sub(r"^(\| [A-Z]+-\d+ \| [^|]+ \|)[^|]+\|", r"\1", line) for line in page.splitlines()]


def _commit() -> str:
    argv = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Write both files and say what is missing."""
    controls = collect()
    EVIDENCE.parent.mkdir(exist_ok=True)
    document = {"commit": _commit(), "controls": [asdict(control) for control in controls]}
    EVIDENCE.write_text(json.dumps(document, indent=1) + "\n")
    CONTROLS.write_text(render(controls))
    words = [control.status.partition(" ")[0] for control in controls]
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("proved", "unproved", "later"))
    for control in controls:
        if control.status.startswith("unproved"):
            print(f"{control.id}: {control.status}")
    print(f"{counts} -> {EVIDENCE.relative_to(ROOT)}, {CONTROLS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
