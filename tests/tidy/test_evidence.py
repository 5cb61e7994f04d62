import re

from tests.defects.catalogue import DEFECTS
from tests.tidy.sources import ROOT, python_files, report
from tools.evidence import CONTROLS, collect, marked_tests, render, requirements, without_status

MARK = re.compile(r"""mark\.req\(\s*["']([A-Z]+-\d+)["']""")


def _marked() -> set[str]:
    return {req for path in python_files("tests") for req in MARK.findall(path.read_text())}


def test_every_requirement_of_this_release_has_a_test() -> None:
    now = [req.id for req in requirements() if req.when == "now"]
    assert len(now) > 20, "docs/requirements.md lost its table"
    report(
        [req for req in now if req not in _marked()],
        'No test is marked @pytest.mark.req("...") with these ids of docs/requirements.md.',
    )


def test_marks_name_known_requirements() -> None:
    report(
        sorted(_marked() - {req.id for req in requirements()}),
        "These ids are not in docs/requirements.md: a typing mistake, or a promise to write down.",
    )


def test_defects_are_well_formed() -> None:
    known = {req.id for req in requirements()}
    ids = [defect.id for defect in DEFECTS]
    problems = [f"{one} is there twice" for one in set(ids) if ids.count(one) > 1]
    for defect in DEFECTS:
        if defect.req not in known:
            problems.append(f"{defect.id}: {defect.req} is not a requirement")
        for test in defect.tests:
            name, _, function = test.partition("::")
            path = ROOT / name
            if not path.is_file():
                problems.append(f"{defect.id}: {name} does not exist")
            elif f"{name}::{function.partition('[')[0]}" not in marked_tests()[defect.req]:
                problems.append(f"{defect.id}: {name} has no {function} of {defect.req}")
    report(problems, "Correct tests/defects/catalogue.py.")


def test_the_controls_are_those_of_this_checkout() -> None:
    shown, found = without_status(CONTROLS.read_text()), without_status(render(collect()))
    changed = [line.split(" | ")[0].strip("| ") for line in found if line not in shown]
    report(changed, "docs/controls.md shows other tests, code or defects for these: run `just evidence`.")


def test_every_control_that_can_be_switched_off_is() -> None:
    families = ("ISO-", "EXE-", "LIF-", "FS-", "RES-")
    now = [req.id for req in requirements() if req.when == "now" and req.id.startswith(families)]
    switched = {defect.req for defect in DEFECTS}
    report([req for req in now if req not in switched], "Plant a defect for each in tests/defects/.")
