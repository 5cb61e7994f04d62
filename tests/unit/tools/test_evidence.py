import pytest

from tools.evidence import Requirement, marked_tests, requirements, status_of, without_status

NOW = Requirement("EXE-4", "now", "A promise.", "")
LATER = Requirement("NET-1", "later", "A promise.", "")
FOR_PEOPLE = Requirement("UX-1", "now", "A promise.", "")


T, U = {"f::t": True}, {"f::t": True, "f::u": True}
FOUND = {"EXE-4/x": "found"}


@pytest.mark.parametrize(
    ("requirement", "marked", "tests", "defects", "status"),
    [
        (NOW, {}, {}, {}, "unproved (no test)"),
        (LATER, {}, {}, {}, "later"),
        (LATER, T, {"f::t": "failed"}, {}, "later"),
        (NOW, T, {}, {}, "unproved (1 of 1 tests not run)"),
        (NOW, T, {"f::t": "passed"}, {}, "unproved (no planted defect)"),
        (NOW, T, {"f::t": "passed"}, FOUND, "proved"),
        (NOW, T, {"f::t": "passed"}, {"EXE-4/x": "MISSED"}, "unproved (defect x: MISSED)"),
        (NOW, T, {"f::t": "passed"}, {"EXE-4/x": "not run"}, "unproved (defect x: not run)"),
        (NOW, U, {"f::t": "passed", "f::u": "failed"}, FOUND, "unproved (1 of 2 tests failed)"),
        (NOW, U, {"f::t": "passed"}, FOUND, "unproved (1 of 2 tests not run)"),
        (NOW, {"f::t": True, "f::u": False}, {"f::t": "passed"}, FOUND, "proved"),
        (NOW, T, {"f::t": "skipped"}, FOUND, "unproved (1 of 1 tests skipped)"),
        (NOW, T, {"f::t[1]": "passed", "f::t[2]": "skipped"}, FOUND, "proved"),
        (NOW, T, {"f::t[1]": "passed", "f::t[2]": "failed"}, FOUND, "unproved (1 of 1 tests failed)"),
        (FOR_PEOPLE, T, {"f::t": "passed"}, {}, "proved"),
    ],
)  # fmt: skip
def test_only_what_was_shown_is_proved(
    requirement: Requirement, marked: dict[str, bool], tests: dict[str, str], defects: dict[str, str], status: str
) -> None:
    assert status_of(requirement, marked, tests, defects) == status


def test_marks_are_read_where_pytest_reads_them() -> None:
    found = marked_tests()
    assert "tests/promises/test_terminal.py::test_job_control" in found["EXE-2"], "of the module"
    assert "tests/promises/test_stdio.py::test_random_bytes_come_back" in found["EXE-9"]
    several = "tests/contract/test_engines.py::test_the_life_of_a_sandbox"
    assert several in found["ISO-1"]
    assert several in found["EXE-1"]


def test_the_status_is_all_that_comes_from_a_run() -> None:
    line = "| EXE-4 | A promise. | {} | `a` | `b` |  | NIST AC-3 |"
    assert without_status(line.format("proved")) == without_status(line.format("unproved (1 of 2 tests failed)"))
    assert without_status(line.format("proved")) != without_status(line.format("proved").replace("`b`", "`c`"))


def test_the_table_of_promises_is_read_whole() -> None:
    found = requirements()
    assert len({req.id for req in found}) == len(found)
    assert {"ISO-1", "EXE-9", "UX-8", "NET-10"} <= {req.id for req in found}
