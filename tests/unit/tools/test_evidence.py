import pytest

from tools.evidence import Requirement, requirements, status_of

NOW = Requirement("EXE-4", "now", "A promise.", "")
LATER = Requirement("NET-1", "later", "A promise.", "")
FOR_PEOPLE = Requirement("UX-1", "now", "A promise.", "")


@pytest.mark.parametrize(
    ("requirement", "tests", "defects", "status"),
    [
        (NOW, {}, {}, "unproved (no test ran)"),
        (LATER, {}, {}, "later"),
        (NOW, {"t": "passed"}, {}, "unproved (no planted defect)"),
        (NOW, {"t": "passed"}, {"EXE-4/x": "found"}, "proved"),
        (NOW, {"t": "passed"}, {"EXE-4/x": "MISSED"}, "unproved (defect x: MISSED)"),
        (NOW, {"t": "passed"}, {"EXE-4/x": "not run"}, "unproved (defect x: not run)"),
        (NOW, {"t": "passed", "u": "failed"}, {"EXE-4/x": "found"}, "unproved (1 of 2 tests did not pass)"),
        (NOW, {"t": "skipped"}, {"EXE-4/x": "found"}, "unproved (1 of 1 tests did not pass)"),
        (FOR_PEOPLE, {"t": "passed"}, {}, "proved"),
    ],
)  # fmt: skip
def test_only_what_was_shown_is_proved(
    requirement: Requirement, tests: dict[str, str], defects: dict[str, str], status: str
) -> None:
    assert status_of(requirement, tests, defects) == status


def test_the_table_of_promises_is_read_whole() -> None:
    found = requirements()
    assert len({req.id for req in found}) == len(found)
    assert {"ISO-1", "EXE-9", "UX-8", "NET-10"} <= {req.id for req in found}
